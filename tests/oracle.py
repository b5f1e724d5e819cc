"""What is correct: random problems, the float64 oracle, and how far from it a result may be.

The rule is flash-attn's: the error against float64 is at most twice that of standard attention evaluated in
the inputs' dtype, plus a floor. Errors are the largest of a tensor; NaNs and infinities must be in the same
places.

The floor says what one rounding of each intermediate does. Standard attention may be exact by luck, in a
tensor of few elements, or because its order of summation cancels exactly where another does not (with a
single visible key, dP - delta is 0 or a rounding error). So the textbook forward and backward are evaluated
in float64 with every intermediate moved by one unit in the last place, up or down at random: what is stored
(exponentials, P, dS, the results) by the epsilon of the inputs' dtype, sums by the epsilon of the compute
dtype times the sum of their terms' magnitudes, which is what another order of summation changes. The
largest deviation of a few draws is the floor.

In float64 the oracle is no more exact than what it judges, and its own error is taken to be the floor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import ModuleType

import torch
from torch import Tensor

from flashtile.masks import Mask
from flashtile.problem import AttentionProblem, Gradients, compute_dtype
from flashtile.reference import attention, cast, sequence
from tests.rounding import Rounding, rounded_attention

DIFFERENTIABLE = ("query", "key", "value", "bias", "alibi_slopes", "sinks")
_DRAWS = 3


def random_problem(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    query_length: int = 33,
    key_length: int = 47,
    head_dim: int = 16,
    value_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    mask: Mask | Tensor | None = None,
    random_bias: tuple[int, int, int, int] | None = None,
    random_alibi: bool = False,
    random_sinks: bool = False,
    generator: torch.Generator | None = None,
    **options: object,
) -> AttentionProblem:
    """Normal inputs with the given sizes; `options` are fields of the problem."""

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    query = normal(batch, heads, query_length, head_dim)
    fields: dict[str, object] = {"scale": head_dim**-0.5, **options}
    if isinstance(mask, Mask):
        intervals = mask.resolve(batch, query_length, key_length, query.device)
        fields |= dict(zip(("lower", "upper", "first", "last", "mask"), intervals, strict=True))
    else:
        fields["mask"] = mask
    if random_bias is not None:
        fields["bias"] = normal(*random_bias)
    if random_alibi:
        fields["alibi_slopes"] = normal(1, heads, dtype=compute_dtype(dtype)).abs() / 8
    if random_sinks:
        fields["sinks"] = normal(heads, dtype=compute_dtype(dtype))
    key = normal(batch, kv_heads, key_length, head_dim)
    value = normal(batch, kv_heads, key_length, head_dim if value_head_dim is None else value_head_dim)
    return AttentionProblem(query, key, value, **fields)


def random_gradients(
    problem: AttentionProblem, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Normal `(grad_out, grad_lse)` of the dtypes a backward pass gets."""
    shape = (*problem.query.shape[:3], problem.value.shape[3])
    grad_out = torch.randn(shape, generator=generator, dtype=torch.float64).to(problem.query.dtype)
    grad_lse = torch.randn(shape[:3], generator=generator, dtype=torch.float64)
    return grad_out, grad_lse.to(compute_dtype(problem.query.dtype))


def results_by_autograd(
    problem: AttentionProblem, grad_out: Tensor, grad_lse: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """`out`, `lse` and `grad_<input>` of standard attention evaluated in `dtype`."""
    problem = cast(problem, dtype)
    leaves = {
        name: tensor.detach().clone().requires_grad_()
        for name in DIFFERENTIABLE
        if (tensor := getattr(problem, name)) is not None
    }
    finite = bool(torch.isfinite(grad_out).all())
    out, lse = attention(dataclasses.replace(problem, **leaves), row_by_row=None if finite else True)
    if grad_lse is None:
        grad_lse = torch.zeros_like(lse)
    found = torch.autograd.grad(
        (out, lse), list(leaves.values()), (grad_out.to(out.dtype), grad_lse.to(lse.dtype))
    )
    gradients = {f"grad_{name}": gradient for name, gradient in zip(leaves, found, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def gradients_by_autograd(
    problem: AttentionProblem, grad_out: Tensor, grad_lse: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The gradients alone, by the name of their input."""
    results = results_by_autograd(problem, grad_out, grad_lse, dtype)
    return {name.removeprefix("grad_"): t for name, t in results.items() if name.startswith("grad_")}


def results_of_backend(
    backend: ModuleType, problem: AttentionProblem, grad_out: Tensor, grad_lse: Tensor | None
) -> dict[str, Tensor]:
    """What a backend writes into tensors full of NaN, with the strides of its inputs."""
    small = compute_dtype(problem.query.dtype)
    results = forward_of_backend(backend, problem, grad_out)
    gradients = Gradients(
        **{name: _poisoned(getattr(problem, name)) for name in ("query", "key", "value")},
        **{
            name: None if (tensor := getattr(problem, name)) is None else _poisoned(tensor, small)
            for name in ("bias", "alibi_slopes", "sinks")
        },
    )
    backend.backward(problem, results["out"], results["lse"], grad_out, grad_lse, gradients)
    found = {f"grad_{name}": gradient for name, gradient in vars(gradients).items() if gradient is not None}
    return results | found


def forward_of_backend(
    backend: ModuleType, problem: AttentionProblem, out_like: Tensor | None = None
) -> dict[str, Tensor]:
    """`out`, with the strides of `out_like`, and `lse`, written over NaN."""
    query, value_dim = problem.query, problem.value.shape[3]
    if out_like is None:
        out_like = query.new_empty(*query.shape[:3], value_dim)
    out = _poisoned(out_like, query.dtype)
    lse = query.new_full(query.shape[:3], math.nan, dtype=compute_dtype(query.dtype))
    backend.forward(problem, out, lse)
    return {"out": out, "lse": lse}


def _poisoned(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full_like(like, math.nan, dtype=dtype)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Small matrices are slower on several threads, and far slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def assert_close_to_oracle(
    actual: Mapping[str, Tensor],
    problem: AttentionProblem,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    *,
    tell_infinities: bool = True,
) -> None:
    """Compare `actual` ("out", "lse", "grad_query", ...; any of them) with the oracle by the rule above.

    Gradients need the `grad_out` (and `grad_lse`) they were computed from. With `tell_infinities=False` a NaN
    may stand for an infinity: what an infinite input becomes in a sum depends on the order of the sum.
    """
    dtype = problem.query.dtype
    if grad_out is None:
        assert not any(name.startswith("grad_") for name in actual), "gradients need grad_out"
        grad_out = torch.zeros(*problem.query.shape[:3], problem.value.shape[3], dtype=dtype)
    exact = results_by_autograd(problem, grad_out, grad_lse, torch.float64)
    floors = rounding_floors(problem, grad_out, grad_lse, exact)
    standard = standard_errors(problem, grad_out, grad_lse, exact) if dtype != torch.float64 else floors
    for name, found in actual.items():
        expected = exact[name]
        assert found.shape == expected.shape, (
            f"{name}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        )
        assert_same_nonfinite(name, found, expected.to(found.dtype), tell_infinities)
        error = largest_error(found, expected)
        allowed = 2 * standard[name] + floors[name]
        assert error <= allowed, (
            f"{name} ({found.dtype}): largest error {error:.3g} against float64, allowed {allowed:.3g} "
            f"(standard attention: {standard[name]:.3g}, floor: {floors[name]:.3g})\n"
            f"{worst_element(found, expected)}"
        )


def assert_close_by_sequence(
    actual: Mapping[str, Tensor],
    problem: AttentionProblem,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> None:
    """The same for sequences with lengths of their own, each compared alone.

    Only results with a row for every query or key can be: `out`, `lse`, and the gradients of query, key and
    value. Without dropout, which numbers the sequences.
    """
    assert problem.dropout_p == 0
    for index in range(problem.sequences):
        own = sequence(problem, index)
        queries = _rows_of_sequence(problem.query_starts, index)
        keys = _rows_of_sequence(problem.key_starts, index)
        if own.query.shape[2] == 0:
            continue
        parts = {
            name: tensor[keys if name in ("grad_key", "grad_value") else queries]
            for name, tensor in actual.items()
        }
        upstream = [None if tensor is None else tensor[queries] for tensor in (grad_out, grad_lse)]
        assert_close_to_oracle(parts, own, *upstream)
    if problem.query_starts is not None:  # rows behind the last sequence
        end = int(problem.query_starts[-1])
        for name in actual.keys() & {"out", "lse", "grad_query"}:
            rest = actual[name][:, :, end:]
            assert (rest == (-math.inf if name == "lse" else 0)).all(), f"{name} behind the last sequence"


def _rows_of_sequence(starts: Tensor | None, index: int) -> tuple[slice, ...]:
    if starts is None:
        return (slice(index, index + 1),)
    return slice(None), slice(None), slice(*(int(start) for start in starts[index : index + 2]))


def standard_errors(
    problem: AttentionProblem, grad_out: Tensor, grad_lse: Tensor | None, exact: Mapping[str, Tensor]
) -> dict[str, float]:
    """The errors of standard attention in the inputs' dtype; its LSE, never rounded to 16 bits."""
    standard = results_by_autograd(problem, grad_out, grad_lse, problem.query.dtype)
    standard["lse"] = attention(cast(problem, compute_dtype(problem.query.dtype)))[1]
    return {name: largest_error(standard[name], tensor) for name, tensor in exact.items()}


def assert_same_nonfinite(name: str, found: Tensor, expected: Tensor, tell_infinities: bool = True) -> None:
    if not tell_infinities:
        found, expected = (t.masked_fill(~torch.isfinite(t), math.nan) for t in (found, expected))
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = kind(found) != kind(expected)
        assert not wrong.any(), (
            f"{name}: {kind.__name__} differs at {wrong.nonzero()[:8].tolist()} ({int(wrong.sum())} places): "
            f"found {found[wrong][:8].tolist()}, expected {expected[wrong][:8].tolist()}"
        )


def largest_error(found: Tensor, exact: Tensor) -> float:
    """Over the places where both are finite; 0 if there are none."""
    error = (found.double() - exact).abs()
    return max(error[torch.isfinite(error)].tolist(), default=0.0)


def worst_element(found: Tensor, exact: Tensor) -> str:
    error = (found.double() - exact).abs().nan_to_num(0.0)
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return f"at {place}: found {found[place].item():.9g}, exact {exact[place].item():.9g}"


def rounding_floors(
    problem: AttentionProblem, grad_out: Tensor, grad_lse: Tensor | None, exact: Mapping[str, Tensor]
) -> dict[str, float]:
    """The largest deviation from `exact` of a few evaluations with every intermediate rounded at random."""
    dtype = problem.query.dtype
    draws = [
        rounded_attention(
            cast(problem, torch.float64),
            grad_out.double(),
            grad_lse if grad_lse is None else grad_lse.double(),
            Rounding(torch.finfo(dtype).eps, torch.finfo(compute_dtype(dtype)).eps, seed),
        )
        for seed in range(_DRAWS)
    ]
    least = {name: smallest_step(dtype if name in _STORED else compute_dtype(dtype)) for name in exact}
    return {
        name: least[name] + max(largest_error(draw[name], tensor) for draw in draws)
        for name, tensor in exact.items()
    }


_STORED = ("out", "grad_query", "grad_key", "grad_value")


def smallest_step(dtype: torch.dtype) -> float:
    """The distance of the smallest numbers of the dtype, where epsilon no longer counts."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
