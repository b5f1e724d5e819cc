"""What is correct: random problems, the float64 oracle, and how far from it a result may be.

The rule is flash-attn's: the error against float64 is at most twice that of standard attention evaluated in
the inputs' dtype, plus a floor. Errors are the largest of a tensor; NaNs and infinities must be in the same
places.

The floor says what one rounding of each intermediate does. Standard attention may be exact by luck, in a
tensor of few elements, or because its order of summation cancels exactly where another does not (with a
single visible key, dP - delta is 0 or a rounding error). So the textbook forward and backward are evaluated
in float64 with every intermediate moved by one unit in the last place, up or down at random: what is stored
(P, dS, the results) by the epsilon of the inputs' dtype, sums by the epsilon of the compute dtype times the
sum of their terms' magnitudes, which is what another order of summation changes. The largest deviation of a
few draws is the floor.

In float64 the oracle is no more exact than what it judges, and its own error is taken to be the floor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator, Mapping
from types import ModuleType

import torch
from torch import Tensor

from flashtile.dropout import dropout_mask, keep_scale
from flashtile.masks import Mask
from flashtile.problem import AttentionProblem, Gradients, compute_dtype
from flashtile.reference import alibi_distance, attention, cast, visible_keys

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

    def poisoned(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full_like(like, math.nan, dtype=dtype)

    small = compute_dtype(problem.query.dtype)
    out = poisoned(grad_out, problem.query.dtype)
    lse = torch.full(problem.query.shape[:3], math.nan, dtype=small)
    gradients = Gradients(
        **{name: poisoned(getattr(problem, name)) for name in ("query", "key", "value")},
        **{
            name: None if (tensor := getattr(problem, name)) is None else poisoned(tensor, small)
            for name in ("bias", "alibi_slopes", "sinks")
        },
    )
    backend.forward(problem, out, lse)
    backend.backward(problem, out, lse, grad_out, grad_lse, gradients)
    found = {f"grad_{name}": gradient for name, gradient in vars(gradients).items() if gradient is not None}
    return {"out": out, "lse": lse, **found}


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


class Rounding:
    """Moves numbers by one unit in the last place, up or down at random."""

    def __init__(self, stored: float, summed: float, seed: int = 0) -> None:
        self.stored = stored
        self.summed = summed
        self._generator = random.Random(seed)

    def store(self, exact: Tensor) -> Tensor:
        return exact + self.stored * exact.abs() * self._signs(exact)

    def compute(self, exact: Tensor) -> Tensor:
        return self.sum(exact, exact.abs())

    def sum(self, exact: Tensor, magnitude: Tensor, terms: int = 1) -> Tensor:
        """A sum of so many terms. Each addition rounds a partial sum by up to half an epsilon
        of `magnitude`: epsilon x sqrt(terms) / 6 in the mean, and three times that is taken here."""
        return exact + self.summed * max(1.0, math.sqrt(terms) / 2) * magnitude * self._signs(exact)

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        return self.sum(left @ right, left.abs() @ right.abs(), left.shape[-1])

    def sum_to(self, like: Tensor, terms: Tensor) -> Tensor:
        count = terms.numel() // max(1, like.numel())
        return self.sum(terms.sum_to_size(like.shape), terms.abs().sum_to_size(like.shape), count)

    def _signs(self, like: Tensor) -> Tensor:
        # Drawing millions of signs is slow; a random place in a pool of them is not.
        size = like.numel()
        pool = _SIGNS if size < _SIGNS.numel() else _SIGNS.repeat(1 + size // _SIGNS.numel())
        start = self._generator.randrange(pool.numel() - size)
        return pool[start : start + size].view(like.shape)


_SIGNS = torch.randint(2, (2**20,), generator=torch.Generator().manual_seed(0)).double() * 2 - 1


def rounded_attention(
    problem: AttentionProblem, grad_out: Tensor, grad_lse: Tensor | None, rounding: Rounding
) -> dict[str, Tensor]:
    """FlashAttention-2's forward and backward (Algorithms 1 and 2) with whole matrices, every step rounded.

    NaN and infinite inputs count as 0, and so does what a row cannot see: this is about rounding only.
    """
    query, key, value, grad_out = (
        t.nan_to_num(0.0, 0.0, 0.0) for t in (problem.query, problem.key, problem.value, grad_out)
    )
    groups = (key.shape[1], query.shape[1] // max(1, key.shape[1]))
    key, value = (t.repeat_interleave(groups[1], dim=1) for t in (key, value))
    visible = visible_keys(problem)
    distance = alibi_distance(query.shape[2], key.shape[2], query.device)

    scores = problem.scale * rounding.matmul(query, key.mT)
    slope = torch.ones_like(scores)
    if problem.softcap is not None:
        capped = rounding.compute(torch.tanh(scores / problem.softcap))
        scores, slope = problem.softcap * capped, 1 - capped**2
    magnitude = scores.abs()
    if problem.bias is not None:
        bias = problem.bias.nan_to_num(0.0, 0.0, 0.0)
        scores, magnitude = scores + bias, magnitude + bias.abs()
    if problem.alibi_slopes is not None:
        alibi = problem.alibi_slopes.nan_to_num(0.0)[:, :, None, None] * distance
        scores, magnitude = scores - alibi, magnitude + alibi.abs()
    scores = rounding.sum(scores, magnitude).masked_fill(~visible, -math.inf)

    sink = torch.full(query.shape[1:2], -math.inf).double() if problem.sinks is None else problem.sinks
    sink = sink[:, None, None].expand(*scores.shape[:3], 1)
    logits = torch.cat([scores, sink], dim=-1)
    row_max = logits.amax(dim=-1, keepdim=True)
    nothing = row_max == -math.inf
    row_max = row_max.masked_fill(nothing, 0.0)
    exponentials = rounding.store(torch.exp(logits - row_max))
    row_sum = rounding.sum_to(row_max, exponentials)
    lse = row_max + torch.log(row_sum.masked_fill(nothing, 1.0))
    # An error in the sum is a relative one, so an absolute one of its logarithm.
    lse = rounding.sum(lse, 1 + lse.abs())
    probabilities = rounding.compute(torch.exp(scores - lse))
    sink_probability = torch.exp(sink - lse)
    kept = torch.ones_like(scores)
    if problem.dropout_p > 0:
        kept = dropout_mask(problem.seed, problem.dropout_p, *scores.shape) * keep_scale(problem.dropout_p)
    dropped = rounding.store(probabilities * kept)
    out = rounding.store(rounding.matmul(dropped, value))

    delta = rounding.matmul(grad_out[..., None, :], out[..., None])[..., 0]
    if grad_lse is not None:
        grad_lse = grad_lse[..., None].nan_to_num(0.0, 0.0, 0.0)
        delta = rounding.sum(delta - grad_lse, grad_lse.abs())
    grad_probabilities = rounding.compute(rounding.matmul(grad_out, value.mT) * kept - delta)
    grad_scores = rounding.compute(probabilities * grad_probabilities)
    grad_products = rounding.store(grad_scores * slope)

    def over_queries(weights: Tensor, rows: Tensor) -> Tensor:
        weights, rows = (t.unflatten(1, groups).flatten(2, 3) for t in (weights, rows))
        return rounding.matmul(weights.mT, rows)

    results = {
        "out": out,
        "lse": lse[..., 0].masked_fill(nothing[..., 0], -math.inf),
        "grad_query": rounding.store(problem.scale * rounding.matmul(grad_products, key)),
        "grad_key": rounding.store(problem.scale * over_queries(grad_products, query)),
        "grad_value": rounding.store(over_queries(dropped, grad_out)),
    }
    if problem.bias is not None:
        results["grad_bias"] = rounding.sum_to(problem.bias, grad_scores)
    if problem.alibi_slopes is not None:
        slopes = problem.alibi_slopes[:, :, None, None]
        results["grad_alibi_slopes"] = rounding.sum_to(slopes, -grad_scores * distance)[:, :, 0, 0]
    if problem.sinks is not None:
        sinks = problem.sinks[None, :, None, None]
        results["grad_sinks"] = rounding.sum_to(sinks, -sink_probability * delta).flatten()
    return results
