"""The front door: results against the oracle, broadcasting, gradients, autocast, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile import masks
from flashtile.problem import AttentionProblem, compute_dtype
from tests.oracle import assert_close_to_oracle, random_gradients, random_problem

TOP_LEFT = masks.causal(alignment="top-left")
BOTTOM_RIGHT = masks.causal(alignment="bottom-right")


def normal(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)


def results(problem: AttentionProblem, mask: masks.Mask | Tensor | None = None) -> dict[str, Tensor]:
    """Output, LSE and gradients of the call that `problem` describes (its mask given apart)."""
    names = ("query", "key", "value", "bias", "alibi_slopes", "sinks")
    leaves = {
        name: tensor.detach().requires_grad_()
        for name in names
        if (tensor := getattr(problem, name)) is not None
    }
    out, lse = flashtile.attention(
        **leaves,
        mask=mask,
        scale=problem.scale,
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
        seed=problem.seed,
        return_lse=True,
    )
    grad_out, grad_lse = random_gradients(problem, torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((out, lse), list(leaves.values()), (grad_out, grad_lse))
    found = {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    for name, gradient in found.items():
        assert gradient.dtype == leaves[name.removeprefix("grad_")].dtype
    return {"out": out.detach(), "lse": lse.detach(), **found}


CALLS = {
    "plain": ({}, None),
    "causal": ({}, BOTTOM_RIGHT),
    "value head_dim": ({"value_head_dim": 5}, TOP_LEFT),
    "window of padded": ({}, masks.window(9, 2, alignment="bottom-right") & masks.key_lengths([47, 20])),
    "tree": ({}, masks.from_dense(torch.rand(33, 47, generator=torch.Generator().manual_seed(3)) < 0.4)),
    "everything": (
        {
            "softcap": 4.0,
            "random_bias": (1, 4, 33, 47),
            "random_alibi": True,
            "random_sinks": True,
            "dropout_p": 0.3,
            "seed": 2**62 + 5,
        },
        BOTTOM_RIGHT,
    ),
    "no keys": ({"key_length": 0}, None),
    "no keys but sinks": ({"key_length": 0, "random_sinks": True}, None),
    "no queries": ({"query_length": 0}, None),
    "empty batch": ({"batch": 0}, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_agree_with_the_oracle(name, dtype):
    options, mask = CALLS[name]
    problem = random_problem(mask=mask, dtype=dtype, **options)
    grad_out, grad_lse = random_gradients(problem, torch.Generator().manual_seed(1))
    assert_close_to_oracle(results(problem, mask), problem, grad_out, grad_lse)


def test_the_direct_call_and_the_operator_give_the_same_bits():
    query, key, value = normal(2, 4, 9, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 5)
    direct = flashtile.attention(query, key, value, mask=BOTTOM_RIGHT, return_lse=True)
    recorded = flashtile.attention(query.requires_grad_(), key, value, mask=BOTTOM_RIGHT, return_lse=True)
    for ours, theirs in zip(direct, recorded, strict=True):
        assert torch.equal(ours, theirs.detach())


def test_three_dimensions_are_one_head_each():
    query, key, value = normal(3, 9, 8), normal(3, 7, 8), normal(3, 7, 5)
    mask, bias = torch.rand(3, 9, 7) < 0.7, normal(3, 1, 7)
    options = {"alibi_slopes": torch.tensor([0.25]), "sinks": torch.tensor([0.5])}
    out, lse = flashtile.attention(query, key, value, mask=mask, bias=bias, return_lse=True, **options)
    four = [tensor.unsqueeze(1) for tensor in (query, key, value)]
    expected, expected_lse = flashtile.attention(
        *four, mask=mask.unsqueeze(1), bias=bias.unsqueeze(1), return_lse=True, **options
    )
    assert out.shape == (3, 9, 5)
    assert lse.shape == (3, 9)
    torch.testing.assert_close(out, expected.squeeze(1))
    torch.testing.assert_close(lse, expected_lse.squeeze(1))
    lengths = masks.key_lengths([7, 0, 3])
    padded = flashtile.attention(query, key, value, mask=lengths)
    torch.testing.assert_close(padded, flashtile.attention(*four, mask=lengths).squeeze(1))


@pytest.mark.parametrize(
    "shape", [(), (7,), (1,), (9, 7), (9, 1), (4, 1, 7), (4, 9, 7), (2, 1, 9, 7), (2, 4, 9, 7)]
)
def test_masks_and_biases_of_lower_rank_broadcast(shape):
    query, key, value = normal(2, 4, 9, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 8)
    mask = torch.rand(shape) < 0.8
    expected = flashtile.attention(query, key, value, mask=mask.expand(2, 4, 9, 7))
    torch.testing.assert_close(flashtile.attention(query, key, value, mask=mask), expected)
    bias = normal(*shape, requires_grad=True)
    full = bias.detach().expand(2, 4, 9, 7).clone().requires_grad_()
    outs = [flashtile.attention(query, key, value, bias=given) for given in (bias, full)]
    torch.testing.assert_close(outs[0], outs[1])
    grad_out = normal(2, 4, 9, 8)
    (gradient,) = torch.autograd.grad(outs[0], bias, grad_out)
    (expected,) = torch.autograd.grad(outs[1], full, grad_out)
    assert gradient.shape == bias.shape
    torch.testing.assert_close(gradient, expected.sum_to_size(shape), rtol=1e-4, atol=1e-5)


def test_alibi_slopes_may_differ_in_the_batch():
    query, key, value = normal(2, 4, 9, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 8)
    slopes = torch.rand(2, 4)
    together = flashtile.attention(query, key, value, alibi_slopes=slopes)
    for entry in range(2):
        alone = (tensor[entry : entry + 1] for tensor in (query, key, value))
        expected = flashtile.attention(*alone, alibi_slopes=slopes[entry])
        assert torch.equal(together[entry : entry + 1], expected)


def test_output_follows_the_memory_order_of_the_query():
    query, key = (normal(2, length, 4, 8).transpose(1, 2) for length in (9, 7))
    assert flashtile.attention(query, key, key).stride() == query.stride()
    wide = flashtile.attention(query, key, normal(2, 4, 7, 5))
    assert wide.transpose(1, 2).is_contiguous()
    assert flashtile.attention(query.contiguous(), key, normal(2, 4, 7, 5)).is_contiguous()


@pytest.mark.parametrize("seed", [7, torch.tensor(7)], ids=["int", "tensor"])
def test_a_seed_without_dropout_changes_nothing(seed):
    """As in evaluation: `dropout_p=self.dropout_p if self.training else 0.0, seed=seed`."""
    query = normal(2, 4, 9, 8)
    before = torch.get_rng_state()
    found = flashtile.attention(query, query, query, dropout_p=0.0, seed=seed)
    assert torch.equal(found, flashtile.attention(query, query, query))
    packed = query.transpose(1, 2).flatten(0, 1)
    found = flashtile.attention_varlen(packed, packed, packed, [0, 9, 18], dropout_p=0.0, seed=seed)
    assert torch.equal(found, flashtile.attention_varlen(packed, packed, packed, [0, 9, 18]))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_follows_the_seed_and_the_generator():
    query = normal(2, 4, 16, 8)

    def dropped(seed: int | Tensor | None = None) -> Tensor:
        return flashtile.attention(query, query, query, dropout_p=0.4, seed=seed)

    assert torch.equal(dropped(7), dropped(7))
    assert torch.equal(dropped(torch.tensor([7])), dropped(7))
    assert torch.equal(dropped(-1), dropped(2**64 - 1))
    assert not torch.equal(dropped(7), dropped(8))
    torch.manual_seed(3)
    first, second = dropped(), dropped()
    torch.manual_seed(3)
    assert torch.equal(dropped(), first)
    assert not torch.equal(first, second)
    ones = torch.ones(2, 4, 16, 16)
    kept = flashtile.dropout_mask(7, 0.4, 2, 4, 16, 16)
    identity = torch.eye(16).expand(2, 4, 16, 16)
    seen = flashtile.attention(torch.zeros(2, 4, 16, 8), query, identity, dropout_p=0.4, seed=7)
    torch.testing.assert_close(seen, ones * kept / 0.6 / 16)


def test_dropping_everything_gives_zeros():
    query = normal(1, 2, 5, 4, requires_grad=True)
    out = flashtile.attention(query, query, query, dropout_p=1.0)
    out.sum().backward()
    assert torch.count_nonzero(out) == torch.count_nonzero(query.grad) == 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_recomputes_the_same_dropout(use_reentrant):
    query = normal(2, 2, 9, 8, requires_grad=True)

    def dropped(tensor: Tensor) -> Tensor:
        return flashtile.attention(tensor, tensor, tensor, dropout_p=0.5)

    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(dropped(query).sin().sum(), query)
    torch.manual_seed(1)
    checkpoint(lambda tensor: dropped(tensor).sin().sum(), query, use_reentrant=use_reentrant).backward()
    assert torch.equal(query.grad, expected)


def test_autocast_computes_in_its_dtype_and_gradients_keep_theirs():
    query, key, value = (normal(2, 4, 9, 8, requires_grad=True) for _ in range(3))
    bias = normal(9, 9, requires_grad=True)
    slopes, sinks = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = flashtile.attention(
            query, key.bfloat16(), value, bias=bias, alibi_slopes=slopes, sinks=sinks, return_lse=True
        )
        wide = flashtile.attention(query.double(), key.double(), value.double())
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert wide.dtype == torch.float64  # as PyTorch's own operators do
    (out.float().sum() + lse.sum()).backward()
    for tensor in (query, key, value, bias, slopes, sinks):
        assert tensor.grad.dtype == torch.float32
    with torch.no_grad():
        exact = flashtile.attention(
            *(tensor.bfloat16() for tensor in (query, key, value)),
            bias=bias.bfloat16(),
            alibi_slopes=slopes,
            sinks=sinks,
        )
    assert torch.equal(out, exact)


def test_only_wanted_gradients_are_returned():
    query, key, value = (normal(1, 2, 5, 4) for _ in range(3))
    sinks = torch.rand(2, requires_grad=True)
    flashtile.attention(query, key, value.requires_grad_(), sinks=sinks).sum().backward()
    assert query.grad is None
    assert key.grad is None
    assert value.grad is not None
    assert sinks.grad is not None


def test_lse_alone_is_differentiable():
    query, key = (normal(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    _, lse = flashtile.attention(query, key, key.detach(), return_lse=True)
    (gradient,) = torch.autograd.grad(lse.sum(), query)
    scores = 0.5 * query.detach() @ key.detach().mT
    torch.testing.assert_close(gradient, 0.5 * scores.softmax(-1) @ key.detach())


GRADCHECKS = {
    "plain": {},
    "grouped": {"kv_heads": 1},
    "value head_dim": {"value_head_dim": 2},
    "causal": {"mask": BOTTOM_RIGHT},
    "top-left causal": {"mask": TOP_LEFT},
    "window and lengths": {"mask": masks.window(2, 1, alignment="top-left") & masks.key_lengths([4, 1])},
    "dense mask": {"mask": torch.rand(2, 2, 3, 4, generator=torch.Generator().manual_seed(1)) < 0.6},
    "bias": {"bias": (2, 2, 3, 4)},
    "bias of heads": {"bias": (2, 1, 1)},
    "bias of queries": {"bias": (3, 1)},
    "bias of keys": {"bias": (4,)},
    "bias of batch": {"bias": (2, 1, 1, 4)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "slopes": {"slopes": (2,)},
    "slopes of batch": {"slopes": (2, 2)},
    "dropout": {"dropout_p": 0.4},
    "all": {
        "kv_heads": 1,
        "value_head_dim": 2,
        "mask": BOTTOM_RIGHT & masks.key_lengths([3, 4]),
        "bias": (2, 3, 4),
        "softcap": 2.0,
        "sinks": True,
        "slopes": (2, 2),
        "dropout_p": 0.3,
    },
}


@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradcheck(name):
    options = dict(GRADCHECKS[name])
    kv_heads = options.pop("kv_heads", 2)
    shapes = [(2, 2, 3, 3), (2, kv_heads, 4, 3), (2, kv_heads, 4, options.pop("value_head_dim", 3))]
    tensors = [normal(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    names = ["query", "key", "value"]
    for name, shape in (
        ("bias", options.pop("bias", None)),
        ("alibi_slopes", options.pop("slopes", None)),
        ("sinks", (2,) if options.pop("sinks", False) else None),
    ):
        if shape is not None:
            names.append(name)
            tensors.append(normal(*shape, dtype=torch.float64, requires_grad=True))

    def call(*given: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flashtile.attention(
            **dict(zip(names, given, strict=True)), **options, seed=5, return_lse=True
        )
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(call, tensors, check_batched_grad=name == "all")


REFUSALS = [
    ({"query": [1.0]}, TypeError, r"query must be a torch.Tensor, got list"),
    ({"value": None}, TypeError, r"value must be a torch.Tensor, got NoneType"),
    ({"query": normal(8)}, ValueError, r"query must be \(batch, heads, length, head_dim\).*got shape \(8,\)"),
    ({"key": normal(2, 7, 8)}, ValueError, r"key must have the number of dimensions of query, 4, got shape"),
    ({"key": normal(3, 4, 7, 8)}, ValueError, r"key must have the batch size of query, 2, got shape \(3,"),
    ({"key": normal(2, 4, 7, 6)}, ValueError, r"key must have the head_dim of query, 8, got .*7, 6\)"),
    (
        {"value": normal(2, 4, 6, 8)},
        ValueError,
        r"value must have all sizes of key but the last",
    ),
    (
        {"key": normal(2, 3, 7, 8), "value": normal(2, 3, 7, 8)},
        ValueError,
        r"key and value must have a number of heads that divides query's 4, got shape \(2, 3, 7, 8\)",
    ),
    (
        {"key": normal(2, 7, 4, 8), "value": normal(2, 7, 4, 8)},
        ValueError,
        r"\(2, 7, 4, 8\); if dimension 1 of these tensors is the length, pass tensor.transpose\(1, 2\)$",
    ),
    (
        {"query": torch.nested.nested_tensor([normal(3, 4, 8)], layout=torch.jagged)},
        TypeError,
        r"query must be a dense tensor, got a nested one; flashtile.attention_varlen takes .values\(\)",
    ),
    ({"value": normal(2, 4, 7, 0)}, ValueError, r"value must have a head_dim of at least 1"),
    (
        {"key": normal(2, 4, 7, 8).double()},
        TypeError,
        r"key must have the dtype of query, torch.float32, got",
    ),
    (
        {name: torch.ones(2, 4, 7, 8, dtype=torch.int32) for name in ("query", "key", "value")},
        TypeError,
        r"query must have one of the dtypes torch.float32, .*got torch.int32",
    ),
    (
        {"value": normal(2, 4, 7, 8).to("meta")},
        ValueError,
        r"value must be on the device of query, cpu, got meta",
    ),
    ({"query": normal(2, 4, 9, 8).to_sparse()}, TypeError, r"query must be a dense \(strided\) tensor"),
    ({"mask": "causal"}, TypeError, r"mask must be a flashtile.Mask or a bool tensor, got str"),
    ({"is_causal": True}, TypeError, r"unexpected keyword argument 'is_causal'; say mask=masks.causal\(\)"),
    ({"dropout": 0.1}, TypeError, r"unexpected keyword argument 'dropout'; did you mean dropout_p\?$"),
    ({"softmax_scale": 1.0}, TypeError, r"unexpected keyword argument 'softmax_scale'; say scale=$"),
    ({"return_softmax_lse": True}, TypeError, r"'return_softmax_lse'; did you mean return_lse\?$"),
    ({"flavour": 1}, TypeError, r"^attention\(\) got an unexpected keyword argument 'flavour'$"),
    ({"mask": masks.causal}, TypeError, r"got the function itself; call it, as in masks.causal\("),
    ({"mask": lambda b, h, i, j: i >= j}, TypeError, r"got function; functions of positions are not"),
    ({"mask": torch.zeros(9, 7)}, TypeError, r"mask must be .*got a torch.float32 tensor; pass .* as bias"),
    ({"mask": torch.ones(2, 7).long()}, TypeError, r"mask must be .*make mask.bool\(\)\[:, None, None\]"),
    (
        {"mask": torch.ones(2, 9, 7, dtype=torch.bool)},
        ValueError,
        r"mask must broadcast to \(batch, heads, query_length, key_length\) = \(2, 4, 9, 7\), got shape",
    ),
    ({"mask": torch.ones(1, 1, 1, 9, 7, dtype=torch.bool)}, ValueError, r"mask must broadcast to"),
    (
        {"mask": torch.ones(2, 7, dtype=torch.bool)},
        ValueError,
        r"\(2, 7\); if that is \(batch, keys\), pass mask\[:, None, None, :\] or masks.key_lengths\(",
    ),
    (
        {"mask": masks.key_lengths([1, 2, 3])},
        ValueError,
        r"key_lengths: the batch dimension must be 2 or 1, got 3",
    ),
    (
        {"mask": TOP_LEFT & masks.from_dense(torch.ones(3, 9, 7, dtype=torch.bool))},
        ValueError,
        r"mask must have as many heads as query, 4, or 1, got 3: causal",
    ),
    ({"mask": masks.causal()}, ValueError, r"causal needs an alignment where lengths differ"),
    ({"bias": 1.0}, TypeError, r"bias must be a torch.Tensor, got float"),
    ({"bias": torch.ones(9, 7, dtype=torch.bool)}, TypeError, r"bias must have the dtype of query.*as mask"),
    ({"bias": normal(9, 7).double()}, TypeError, r"bias must have the dtype of query, torch.float32, got"),
    ({"bias": normal(7, 9)}, ValueError, r"bias must broadcast to .*got shape \(7, 9\)$"),
    ({"bias": normal(2, 7)}, ValueError, r"if that is \(batch, keys\), pass bias\[:, None, None, :\]$"),
    ({"bias": normal(9, 7).to("meta")}, ValueError, r"bias must be on the device of query, cpu, got meta"),
    ({"scale": "1"}, TypeError, r"scale must be a Python float, got str"),
    ({"scale": math.nan}, ValueError, r"scale must be finite, got nan"),
    ({"softcap": 0.0}, ValueError, r"softcap must be finite and above 0, got 0.0"),
    ({"softcap": math.inf}, ValueError, r"softcap must be finite and above 0, got inf"),
    ({"alibi_slopes": [0.5]}, TypeError, r"alibi_slopes must be a torch.Tensor, got list"),
    (
        {"alibi_slopes": torch.ones(4, dtype=torch.int64)},
        TypeError,
        r"alibi_slopes must have a floating-point",
    ),
    (
        {"alibi_slopes": torch.ones(3)},
        ValueError,
        r"alibi_slopes must have shape \(heads,\) = \(4,\) or .*\(3,\)",
    ),
    ({"alibi_slopes": torch.ones(3, 4)}, ValueError, r"alibi_slopes must have shape .*= \(2, 4\), got"),
    ({"sinks": torch.ones(2)}, ValueError, r"sinks must have shape \(heads,\) = \(4,\), got shape \(2,\)"),
    ({"sinks": torch.ones(4, device="meta")}, ValueError, r"sinks must be on the device of query"),
    ({"dropout_p": 1.5}, ValueError, r"dropout_p must be between 0 and 1, got 1.5"),
    ({"dropout_p": True}, TypeError, r"dropout_p must be a Python float, got bool"),
    ({"dropout_p": math.nan}, ValueError, r"dropout_p must be between 0 and 1, got nan"),
    ({"dropout_p": 0.1, "seed": 2**64}, ValueError, r"seed must fit in 64 bits, got 18446744073709551616"),
    ({"seed": 0.5}, TypeError, r"seed must be an int or an int64 tensor, got float"),
    ({"seed": torch.tensor([1, 2])}, TypeError, r"seed must be .* of one element, got torch.int64 \(2,\)"),
    ({"seed": torch.tensor(1.0)}, TypeError, r"seed must be .* of one element, got torch.float32 \(\)"),
]


@pytest.mark.parametrize(
    ("wrong", "error", "message"), REFUSALS, ids=[message[:40] for _, _, message in REFUSALS]
)
def test_refusals_name_the_argument_what_was_expected_and_what_came(wrong, error, message):
    arguments = {"query": normal(2, 4, 9, 8), "key": normal(2, 4, 7, 8), "value": normal(2, 4, 7, 8)}
    with pytest.raises(error, match=message):
        flashtile.attention(**{**arguments, **wrong})


def test_three_dimensional_refusals_speak_of_three_dimensions():
    query = normal(2, 9, 8)
    with pytest.raises(
        ValueError, match=r"mask must broadcast to \(batch, query_length, key_length\) = \(2, 9, 9\)"
    ):
        flashtile.attention(query, query, query, mask=torch.ones(3, 9, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"if that is \(batch, keys\), pass mask\[:, None, :\] or"):
        flashtile.attention(query, query, query, mask=torch.ones(2, 9, dtype=torch.bool))


def test_lse_has_the_compute_dtype(dtype):
    query = normal(1, 2, 5, 4, dtype=dtype)
    out, lse = flashtile.attention(query, query, query, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == compute_dtype(dtype)


def test_a_negated_view_is_read_with_its_sign():
    query = torch.complex(normal(1, 2, 5, 4), normal(1, 2, 5, 4)).conj().imag
    assert query.is_neg()
    plain = query.clone()
    assert torch.equal(flashtile.attention(query, query, query), flashtile.attention(plain, plain, plain))
