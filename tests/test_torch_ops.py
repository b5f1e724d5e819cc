"""The operators as PyTorch sees them: schema, fake tensors, autograd, compile, export, torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import masks
from tests.conftest import combines_masks_in_a_graph

FORWARD = torch.ops.flashtile.attention_forward.default
BACKWARD = torch.ops.flashtile.attention_backward.default
BOTTOM_RIGHT = masks.causal(alignment="bottom-right")


def normal(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, requires_grad=requires_grad)


def operator_arguments(**changes: Any) -> tuple[Any, ...]:
    """The arguments of the forward operator by name; the defaults are a plain call."""
    arguments: dict[str, Any] = {
        "query": normal(2, 4, 5, 8),
        "key": normal(2, 2, 7, 8),
        "value": normal(2, 2, 7, 8),
        **dict.fromkeys(("first", "last", "mask", "bias", "alibi_slopes", "sinks", "seed")),
        **dict.fromkeys(("query_starts", "key_starts", "key_lengths", "batch_index", "block_table")),
        "scale": 0.3,
        **dict.fromkeys(("softcap", "lower", "upper")),
        "dropout_p": 0.0,
    }
    assert changes.keys() <= arguments.keys()
    return tuple({**arguments, **changes}.values())


def transposed(*shape: int, requires_grad: bool = False) -> Tensor:
    batch, heads, length, dim = shape
    return normal(batch, length, heads, dim).transpose(1, 2).detach().requires_grad_(requires_grad)


OPERATOR_CALLS = {
    "plain": {},
    "all gradients": {
        "query": normal(2, 4, 5, 8, requires_grad=True),
        "key": normal(2, 2, 7, 8, requires_grad=True),
        "value": normal(2, 2, 7, 3, requires_grad=True),
        "bias": normal(1, 4, 5, 1, requires_grad=True),
        "alibi_slopes": torch.rand(2, 4, requires_grad=True),
        "sinks": torch.rand(4, requires_grad=True),
        "softcap": 2.0,
        "lower": -3,
        "upper": 2,
    },
    "default scale": {"query": normal(2, 4, 5, 8, requires_grad=True), "scale": None},
    "one gradient": {"key": normal(2, 2, 7, 8, requires_grad=True), "upper": 0},
    "gradient of bias only": {"bias": normal(2, 1, 1, 7, requires_grad=True)},
    "transposed": {"query": transposed(2, 4, 5, 8, requires_grad=True), "value": transposed(2, 2, 7, 3)},
    "sliced": {
        "query": normal(2, 4, 10, 16)[:, :, ::2, ::2].requires_grad_(),
        "key": normal(2, 2, 7, 9)[..., 1:],
    },
    "expanded": {
        "key": normal(2, 1, 7, 8).expand(2, 2, 7, 8),
        "value": normal(1, 1, 1, 8).expand(2, 2, 7, 8),
    },
    "dropout": {
        "query": normal(2, 4, 5, 8, requires_grad=True),
        "seed": torch.tensor([7]),
        "dropout_p": 0.3,
    },
    "intervals": {
        "query": normal(2, 4, 5, 8, requires_grad=True),
        "first": torch.tensor([[0], [2]], dtype=torch.int32),
        "last": torch.tensor([[3], [7]], dtype=torch.int32),
    },
    "mask": {"query": normal(2, 4, 5, 8, requires_grad=True), "mask": torch.ones(1, 1, 5, 7).tril().bool()},
    "long": {
        "query": normal(1, 2, 130, 64, requires_grad=True),
        "key": normal(1, 1, 65, 64),
        "value": normal(1, 1, 65, 64),
    },
    "packed": {
        "query": normal(1, 4, 9, 8, requires_grad=True),
        "key": normal(1, 2, 12, 8, requires_grad=True),
        "value": normal(1, 2, 12, 3),
        "query_starts": torch.tensor([0, 3, 8]),
        "key_starts": torch.tensor([0, 2, 12]),
        "upper": 0,
    },
}
CACHE_CALLS = {
    "entries": {"key_lengths": torch.tensor([7, 3]), "batch_index": torch.tensor([1, 0])},
    "pages": {
        "key": normal(5, 2, 3, 8),
        "value": normal(5, 2, 3, 8),
        "key_lengths": torch.tensor([7, 3]),
        "block_table": torch.tensor([[4, 0, 2], [1, -1, -1]], dtype=torch.int32),
    },
}


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("name", [*OPERATOR_CALLS, *CACHE_CALLS])
def test_opcheck_forward(name):
    torch.library.opcheck(FORWARD, operator_arguments(**(OPERATOR_CALLS | CACHE_CALLS)[name]))


def test_a_cache_has_no_backward():
    out, lse = FORWARD(
        *operator_arguments(query=normal(2, 4, 5, 8, requires_grad=True), **CACHE_CALLS["entries"])
    )
    with pytest.raises(NotImplementedError, match=r"attention over a cache .* has no gradient"):
        (out.sum() + lse.sum()).backward()


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("name", OPERATOR_CALLS)
@pytest.mark.parametrize("with_grad_lse", [True, False])
def test_opcheck_backward(name, with_grad_lse):
    arguments = operator_arguments(**OPERATOR_CALLS[name])
    arguments = tuple(value.detach() if isinstance(value, Tensor) else value for value in arguments)
    out, lse = FORWARD(*arguments)
    wanted = [True, False, True, *(arguments[i] is not None for i in (6, 7, 8))]
    grad_lse = torch.randn_like(lse) if with_grad_lse else None
    torch.library.opcheck(BACKWARD, (torch.randn_like(out), grad_lse, out, lse, wanted, *arguments))


def everything(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor, lengths: Tensor
) -> Tensor:
    out, lse = flashtile.attention(
        query,
        key,
        value,
        bias=bias,
        alibi_slopes=sinks * 0.5,
        sinks=sinks,
        softcap=3.0,
        mask=BOTTOM_RIGHT & masks.key_lengths(lengths),
        return_lse=True,
    )
    return out.sin() + lse.unsqueeze(-1)


def inputs_of_everything(batch: int, query_length: int, key_length: int) -> tuple[Tensor, ...]:
    return (
        normal(batch, 4, query_length, 8, requires_grad=True),
        normal(batch, 2, key_length, 8, requires_grad=True),
        normal(batch, 2, key_length, 5, requires_grad=True),
        normal(4, 1, key_length, requires_grad=True),
        torch.rand(4, requires_grad=True),
        torch.randint(1, key_length + 1, (batch,)),
    )


def results(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out.sum(), [t for t in inputs if t.requires_grad])]


@combines_masks_in_a_graph
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
def test_compile_whole_graphs(backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend=backend, dynamic=dynamic)
    for sizes in [(2, 9, 7), (3, 11, 13)] if dynamic else [(2, 9, 7)]:
        inputs = inputs_of_everything(*sizes)
        for found, expected in zip(results(compiled, inputs), results(everything, inputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            assert found.stride() == expected.stride()


def test_compiled_dropout_draws_from_the_generator():
    torch._dynamo.reset()
    query = normal(2, 4, 9, 8, requires_grad=True)

    def dropped(tensor: Tensor) -> Tensor:
        return flashtile.attention(tensor, tensor, tensor, dropout_p=0.5)

    compiled = torch.compile(dropped, fullgraph=True, backend="aot_eager")
    draws = []
    for function in (compiled, compiled, dropped):
        torch.manual_seed(1)
        draws.append(function(query))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(compiled(query), draws[0])
    gradients = [torch.autograd.grad(draw.sin().sum(), query)[0] for draw in draws]
    assert torch.equal(gradients[0], gradients[2])


def test_compiled_seed_mask_tensor_and_autocast():
    torch._dynamo.reset()
    query, mask = normal(2, 4, 9, 8), torch.rand(9, 9) < 0.7

    def call(tensor: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return flashtile.attention(tensor, tensor, tensor, mask=mask, dropout_p=0.5, seed=2**63 + 1)

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(query, mask)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, call(query, mask))


def test_compiled_torch_func():
    torch._dynamo.reset()
    query, key = normal(2, 4, 9, 8), normal(2, 2, 7, 8)

    def gradient(query: Tensor, key: Tensor) -> Tensor:
        return torch.func.grad(lambda tensor: flashtile.attention(tensor, key, key).sin().sum())(query)

    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key), gradient(query, key))


class Causal(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return flashtile.attention(query, key, key, mask=BOTTOM_RIGHT)


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_dynamic_sizes(strict):
    batch, length, head_dim = (
        torch.export.Dim(name, min=2, max=64) for name in ("batch", "length", "head_dim")
    )
    shapes = ({0: batch, 2: length, 3: head_dim}, {0: batch, 3: head_dim})
    inputs = (normal(2, 4, 9, 8), normal(2, 2, 7, 8))
    exported = torch.export.export(Causal(), inputs, dynamic_shapes=shapes, strict=strict)
    assert FORWARD in [node.target for node in exported.graph.nodes if node.op == "call_function"]
    others = (normal(3, 4, 31, 12), normal(3, 2, 7, 12))
    assert torch.equal(exported.module()(*others), Causal()(*others))


def mapped_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(3, 2, heads, 5, 4, dtype=torch.float64) for heads in (4, 2, 2))  # type: ignore[return-value]


VMAPS = {
    "plain": ((0, 0, 0), {}),
    "query only": ((0, None, None), {"mask": BOTTOM_RIGHT}),
    "inner dimensions": ((2, None, 1), {}),
    "dropout": ((0, 0, 0), {"dropout_p": 0.4, "seed": 3}),
    "shared bias": ((0, 0, 0), {"bias": torch.randn(1, 4, 1, 5, dtype=torch.float64)}),
    "shared intervals": ((0, 0, 0), {"mask": masks.key_lengths([2, 4])}),
    "shared sinks": ((0, 0, 0), {"sinks": torch.rand(4)}),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_is_a_loop(name):
    dims, options = VMAPS[name]
    inputs = [
        tensor[0] if dim is None else tensor.movedim(0, dim)
        for tensor, dim in zip(mapped_inputs(), dims, strict=True)
    ]

    def call(*tensors: Tensor) -> Tensor:
        return flashtile.attention(*tensors, **options)

    found = torch.vmap(call, dims)(*inputs)
    for index in range(3):
        slices = [t if dim is None else t.select(dim, index) for t, dim in zip(inputs, dims, strict=True)]
        torch.testing.assert_close(found[index], call(*slices))


@pytest.mark.parametrize("argument", ["mask", "bias", "alibi_slopes", "sinks", "lengths"])
def test_vmap_over_an_option(argument):
    query, key, value = (tensor[0] for tensor in mapped_inputs())
    options = {
        "mask": torch.rand(3, 5, 5) < 0.7,
        "bias": torch.randn(3, 4, 1, 5, dtype=torch.float64),
        "alibi_slopes": torch.rand(3, 4),
        "sinks": torch.rand(3, 4),
        "lengths": torch.tensor([[1, 5], [2, 3], [4, 4]]),
    }[argument]

    def call(option: Tensor) -> Tensor:
        given = {"mask": masks.key_lengths(option)} if argument == "lengths" else {argument: option}
        return flashtile.attention(query, key, value, **given)

    found = torch.vmap(call)(options)
    for index in range(3):
        torch.testing.assert_close(found[index], call(options[index]))


def test_vmap_randomness():
    query = torch.ones(3, 1, 2, 9, 4)

    def dropped(tensor: Tensor) -> Tensor:
        return flashtile.attention(tensor, tensor, tensor, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(dropped)(query)
    same = torch.vmap(dropped, randomness="same")(query)
    assert torch.equal(same[0], same[1])
    different = torch.vmap(dropped, randomness="different")(query)
    assert not torch.equal(different[0], different[1])


@pytest.mark.parametrize("shared", ["bias", "sinks"])
def test_gradients_of_each_sample(shared):
    query, key, value = mapped_inputs()
    shapes = {"bias": (1, 4, 1, 5), "sinks": (4,)}
    option = torch.randn(shapes[shared], dtype=torch.float64)
    slopes = torch.rand(1, 4, dtype=torch.float64)

    def loss(query: Tensor, key: Tensor, option: Tensor, slopes: Tensor, value: Tensor) -> Tensor:
        out, lse = flashtile.attention(
            query, key, value, alibi_slopes=slopes, return_lse=True, **{shared: option}
        )
        return out.sin().sum() + lse.sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    found = torch.vmap(gradient, in_dims=(0, 0, None, None, 0))(query, key, option, slopes, value)
    for index in range(3):
        expected = gradient(query[index], key[index], option, slopes, value[index])
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[index], theirs)


def test_jacobians_agree():
    query, key, value = (tensor[0] for tensor in mapped_inputs())

    def call(tensor: Tensor) -> Tensor:
        return flashtile.attention(tensor, key, value)[0, 0]

    expected = torch.autograd.functional.jacobian(call, query)
    torch.testing.assert_close(torch.func.jacrev(call)(query), expected)
    torch.testing.assert_close(torch.autograd.functional.jacobian(call, query, vectorize=True), expected)


def test_second_derivatives():
    options = {"dtype": torch.float64, "requires_grad": True}
    inputs = (
        torch.randn(1, 2, 3, 3, **options),
        torch.randn(1, 1, 4, 3, **options),
        torch.randn(1, 1, 4, 2, **options),
        torch.randn(2, 1, 4, **options),
        torch.rand(2, **options),
        torch.rand(2, **options),
    )

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, slopes: Tensor, sinks: Tensor) -> Any:
        options = {"mask": BOTTOM_RIGHT, "softcap": 2.0, "dropout_p": 0.2, "seed": 3, "return_lse": True}
        return flashtile.attention(query, key, value, bias=bias, alibi_slopes=slopes, sinks=sinks, **options)

    assert torch.autograd.gradgradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(lambda t: flashtile.attention(t, t, t[..., :2]), inputs[:1])


def test_second_derivatives_of_torch_func():
    query = torch.randn(1, 2, 3, 3, dtype=torch.float64)

    def loss(tensor: Tensor) -> Tensor:
        return flashtile.attention(tensor, tensor, tensor, scale=0.5).sin().sum()

    def standard_loss(tensor: Tensor) -> Tensor:
        return ((0.5 * tensor @ tensor.mT).softmax(-1) @ tensor).sin().sum()

    for second in (
        lambda f: torch.func.grad(lambda tensor: (torch.func.grad(f)(tensor) ** 2).sum()),
        lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    ):
        torch.testing.assert_close(second(loss)(query), second(standard_loss)(query))


def test_forward_mode_is_refused():
    query = normal(1, 2, 5, 4, requires_grad=True)

    def call(tensor: Tensor) -> Tensor:
        return flashtile.attention(tensor, tensor, tensor).sin().sum()

    for tensor in (query, query.detach()):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(call, (tensor,), (torch.ones_like(query),))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.hessian(call)(tensor)
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(NotImplementedError, match="no forward-mode derivative"),
        ):
            call(torch.autograd.forward_ad.make_dual(tensor, torch.ones_like(query)))


def test_a_profiler_sees_the_operator():
    query = normal(1, 1, 3, 4)
    with torch.profiler.profile() as profile:
        flashtile.attention(query, query, query)
    assert "flashtile::attention_forward" in {event.key for event in profile.key_averages()}
