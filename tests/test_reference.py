"""The reference against torch's own attention, hand-made cases, finite differences and poisoned inputs."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashtile.dropout import dropout_mask
from flashtile.masks import causal, documents, key_lengths, window
from flashtile.problem import AttentionProblem, Part
from flashtile.reference import alibi_distance, attention, cast, kept_entries_of, visible_keys
from tests.oracle import DIFFERENTIABLE, random_problem

problem_of = functools.partial(
    random_problem, query_length=5, key_length=7, head_dim=8, value_head_dim=6, dtype=torch.float64
)


def with_grad(problem: AttentionProblem) -> AttentionProblem:
    tensors = {
        name: tensor.clone().requires_grad_()
        for name in DIFFERENTIABLE
        if (tensor := getattr(problem, name)) is not None
    }
    return dataclasses.replace(problem, **tensors)


def gradients(problem: AttentionProblem, grad_out: Tensor, **options: bool) -> dict[str, Tensor]:
    problem = with_grad(problem)
    out, lse = attention(problem, **options)
    present = [name for name in DIFFERENTIABLE if getattr(problem, name) is not None]
    # Rows without an LSE (-inf) take no part, so that the check is of what the row itself gives.
    loss = (out * grad_out).sum() + torch.where(lse == -math.inf, 0.0, lse).sum()
    return dict(
        zip(present, torch.autograd.grad(loss, [getattr(problem, name) for name in present]), strict=True)
    )


class TestAgainstTorch:
    @pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"mask": causal(alignment="top-left")}])
    def test_sdpa(self, options):
        problem = problem_of(**options)
        out, _ = attention(problem)
        torch.testing.assert_close(
            out,
            scaled_dot_product_attention(
                problem.query,
                problem.key,
                problem.value,
                is_causal="mask" in options,
                scale=problem.scale,
                enable_gqa=True,
            ),
        )

    def test_masked_with_bias(self):
        problem = problem_of(mask=window(1, 2, alignment="top-left") & key_lengths([6, 3]))
        problem = dataclasses.replace(problem, bias=torch.randn(1, 4, 5, 7, dtype=torch.float64))
        visible = visible_keys(problem)
        out, _ = attention(problem)
        torch.testing.assert_close(
            out,
            scaled_dot_product_attention(
                problem.query,
                problem.key,
                problem.value,
                attn_mask=problem.bias.masked_fill(~visible, -math.inf),
                enable_gqa=True,
            ),
        )


class TestByHand:
    """One query, known scores: the query is 1, the keys are the scores, head_dim is 1 and scale is 1."""

    SCORES = (0.0, 0.0, math.log(3), math.log(3))

    def problem(self, **options: object) -> AttentionProblem:
        key = torch.tensor(self.SCORES, dtype=torch.float64).reshape(1, 1, 4, 1)
        value = torch.tensor([0.0, 0, 1, 1], dtype=torch.float64).reshape(1, 1, 4, 1)
        return AttentionProblem(
            torch.ones(1, 1, 1, 1, dtype=torch.float64), key, value, **{"scale": 1.0, **options}
        )

    def result(self, **options: object) -> tuple[float, float]:
        out, lse = attention(self.problem(**options))
        return out.item(), lse.item()

    def test_plain(self):
        assert self.result() == pytest.approx((0.75, math.log(8)))

    def test_scale_then_softcap(self):
        capped = 2 * math.tanh(2 * math.log(3) / 2)
        total = 2 + 2 * math.exp(capped)
        assert self.result(scale=2.0, softcap=2.0) == pytest.approx((1 - 2 / total, math.log(total)))

    def test_sink_is_in_the_denominator(self):
        sinks = torch.tensor([math.log(2)], dtype=torch.float64)
        assert self.result(sinks=sinks) == pytest.approx((0.6, math.log(10)))

    def test_bias_comes_after_the_softcap(self):
        bias = torch.tensor([0.0, math.log(5), -math.inf, 0], dtype=torch.float64).reshape(1, 1, 1, 4)
        third = math.exp(math.tanh(math.log(3)))
        total = 1 + 5 + third
        assert self.result(softcap=1.0, bias=bias) == pytest.approx((third / total, math.log(total)))

    def test_a_low_bias_is_no_mask(self):
        lowest = torch.full((1, 1, 1, 4), -1e300, dtype=torch.float64)
        out, lse = self.result(bias=lowest)
        assert out == pytest.approx(0.5)
        assert lse == -1e300 + math.log(4)

    def test_alibi_measures_from_the_last_key(self):
        slopes = torch.tensor([[math.log(2)]], dtype=torch.float64)
        weights = [1 / 8, 1 / 4, 3 / 2, 3]
        assert self.result(alibi_slopes=slopes) == pytest.approx((4.5 / sum(weights), math.log(sum(weights))))

    def test_dropout_scales_what_is_kept_and_leaves_the_lse(self):
        seed = next(seed for seed in range(99) if dropout_mask(seed, 0.6, 1, 1, 1, 4)[0, 0, 0, 2:].sum() == 1)
        assert self.result(dropout_p=0.6, seed=seed) == pytest.approx((3 / 8 / 0.4, math.log(8)))
        assert self.result(dropout_p=1.0) == pytest.approx((0.0, math.log(8)))

    def test_first_and_last(self):
        first, last = torch.tensor([[1]], dtype=torch.int32), torch.tensor([[3]], dtype=torch.int32)
        assert self.result(first=first, last=last) == pytest.approx((0.75, math.log(4)))
        assert self.result(first=last, last=first) == (0.0, -math.inf)


EVERYTHING = {
    "softcap": 3.0,
    "alibi_slopes": torch.tensor([[0.5, 0.25, 0.1, 0.01]], dtype=torch.float64),
    "sinks": torch.tensor([0.3, -1.0, 0.0, 2.0], dtype=torch.float64),
    "dropout_p": 0.3,
    "seed": 2**60 + 7,
}


def some_bias() -> Tensor:
    bias = torch.randn(2, 1, 5, 7, dtype=torch.float64)
    bias[0, 0, 1, 2:5] = -math.inf
    bias[1, 0, 3] = -math.inf
    return bias


class TestGradients:
    @pytest.mark.parametrize("row_by_row", [False, True])
    @pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
    def test_gradcheck(self, row_by_row, options):
        mask = window(2, 0, alignment="bottom-right") & key_lengths([7, 3])
        bias = some_bias() if options else None
        problem = with_grad(problem_of(head_dim=3, value_head_dim=2, mask=mask, bias=bias, **options))
        names = [name for name in DIFFERENTIABLE if getattr(problem, name) is not None]

        def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            called = dataclasses.replace(problem, **dict(zip(names, tensors, strict=True)))
            out, lse = attention(called, row_by_row=row_by_row)
            return out, torch.where(lse == -math.inf, 0.0, lse)

        inputs = [getattr(problem, name) for name in names]
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)

    def test_row_by_row_is_the_same(self):
        problem = problem_of(mask=window(2, 2, alignment="top-left"), bias=some_bias(), **EVERYTHING)
        torch.testing.assert_close(attention(problem, row_by_row=True), attention(problem, row_by_row=False))


class TestNothingToSee:
    @pytest.mark.parametrize("row_by_row", [False, True])
    def test_rows_without_keys(self, row_by_row):
        problem = problem_of(mask=key_lengths([0, 7]))
        out, lse = attention(problem, row_by_row=row_by_row)
        assert (out[0] == 0).all()
        assert (lse[0] == -math.inf).all()
        found = gradients(problem, torch.ones_like(out), row_by_row=row_by_row)
        for gradient in found.values():
            assert (gradient[0] == 0).all()
            assert gradient[1].abs().max() > 0
            assert torch.isfinite(gradient).all()

    def test_a_gradient_into_an_lse_of_minus_infinity_goes_nowhere(self):
        problem = with_grad(problem_of(mask=key_lengths([0, 7])))
        _, lse = attention(problem)
        (gradient,) = torch.autograd.grad(lse, problem.query, torch.ones_like(lse))
        assert (gradient[0] == 0).all()

    def test_a_sink_is_then_the_whole_denominator(self):
        sinks = torch.tensor([0.5, 1.0, -math.inf, 2.0], dtype=torch.float64)
        problem = with_grad(problem_of(mask=key_lengths(0), sinks=sinks))
        out, lse = attention(problem)
        assert (out == 0).all()
        assert torch.equal(lse, sinks[None, :, None].expand_as(lse))
        (gradient,) = torch.autograd.grad(lse.sum(), problem.sinks)
        assert gradient.tolist() == [10.0, 10.0, 0.0, 10.0]

    @pytest.mark.parametrize("row_by_row", [False, True])
    def test_a_row_whose_visible_scores_are_all_minus_infinity(self, row_by_row):
        """Row 2 by its query, row 3 by an overflow; torch's attention and the kernels say the same."""
        problem = problem_of(mask=key_lengths([7, 3]), scale=1.0)
        problem.query[:, :, 2] = torch.tensor([-math.inf, *[0.0] * 7])
        problem.query[:, :, 3] = -1e300
        problem.key.abs_()
        bias = torch.zeros(1, 1, 5, 7, dtype=torch.float64)
        bias[:, :, 3] = torch.finfo(torch.float64).min
        problem = dataclasses.replace(problem, bias=bias)
        out, lse = attention(problem, row_by_row=row_by_row)
        expected = scaled_dot_product_attention(
            problem.query, problem.key, problem.value, scale=1.0, enable_gqa=True,
            attn_mask=bias.masked_fill(~visible_keys(problem), -math.inf),
        )  # fmt: skip
        torch.testing.assert_close(out, expected)
        dead = torch.tensor([False, False, True, True, False])
        assert (out[:, :, dead] == 0).all()
        assert torch.equal(lse == -math.inf, dead.expand_as(lse))
        found = gradients(problem, torch.ones_like(out), row_by_row=row_by_row)
        assert (found["query"][:, :, dead] == 0).all()
        assert (found["bias"][:, :, dead] == 0).all()
        assert torch.isfinite(found["value"]).all()

    @pytest.mark.parametrize("name", ["query", "key", "value", "bias"])
    def test_beside_minus_infinity_a_nan_stays(self, name):
        problem = problem_of(batch=1, bias=torch.zeros(1, 1, 5, 7, dtype=torch.float64))
        problem.query[:, :, 2, 0] = -math.inf
        problem.key.abs_()
        getattr(problem, name)[:, :, 2] = math.nan
        out, lse = attention(problem)
        assert torch.isnan(out[:, :, 2]).all()
        assert torch.isnan(lse[:, :, 2]).all() or name == "value"

    @pytest.mark.parametrize(
        "sizes",
        [{"batch": 0}, {"heads": 0, "kv_heads": 0}, {"query_length": 0}, {"key_length": 0}],
        ids=lambda sizes: next(iter(sizes)),
    )
    @pytest.mark.parametrize("sinks", [False, True])
    def test_empty_dimensions(self, sizes, sinks):
        problem = problem_of(**sizes)
        if sinks:
            problem = dataclasses.replace(
                problem, sinks=torch.zeros(problem.query.shape[1], dtype=torch.float64)
            )
        out, lse = attention(problem)
        assert out.shape == (*problem.query.shape[:3], 6)
        assert (out == 0).all()
        assert (lse == (0.0 if sinks else -math.inf)).all()
        for gradient in gradients(problem, torch.ones_like(out)).values():
            assert (gradient == 0).all() or sizes.get("key_length") == 0


class TestPoison:
    """What does not see a NaN or an infinity is exactly what it is without it."""

    MASK = window(2, 0, alignment="bottom-right") & documents([0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2])

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("where", ["key", "value"])
    @pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
    def test_keys(self, bad, where, options):
        clean = problem_of(mask=self.MASK, bias=some_bias() if options else None, **options)
        poisoned_tensor = getattr(clean, where).clone()
        poisoned_tensor[0, 1, 4, 2] = bad  # key 4 of the second key head: query heads 2 and 3
        poisoned = dataclasses.replace(clean, **{where: poisoned_tensor})
        sees = visible_keys(clean)[0, 2:, :, 4]
        assert sees.any()
        assert not sees.all()

        (out, lse), (clean_out, clean_lse) = attention(poisoned), attention(clean)
        reached = torch.zeros(out.shape[:3], dtype=torch.bool)
        reached[0, 2:] = sees
        spoilt = ~torch.isfinite(out).all(dim=-1)
        if where == "key" and bad == math.inf:  # the score may be -inf, or capped: a result like any other
            assert not (spoilt & ~reached).any()
        else:
            assert torch.equal(spoilt, reached)
        torch.testing.assert_close(out[~reached], clean_out[~reached])
        torch.testing.assert_close(lse[~reached], clean_lse[~reached])

        grad_out = torch.randn_like(out)
        found, expected = gradients(poisoned, grad_out), gradients(clean, grad_out)
        assert not (~torch.isfinite(found["query"]).all(dim=-1) & ~reached).any()
        torch.testing.assert_close(found["query"][~reached], expected["query"][~reached])
        # A key's gradient comes from the rows that see it, so it is reached where one of those is.
        keys = (visible_keys(clean) & reached[..., None]).any(dim=2).unflatten(1, (2, 2)).any(dim=2)
        for name in ("key", "value"):
            spoilt = ~torch.isfinite(found[name]).all(dim=-1)
            assert not (spoilt & ~keys).any()
            torch.testing.assert_close(found[name][~keys], expected[name][~keys])

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
    @pytest.mark.parametrize("row", [1, 4])  # row 4 sees nothing
    def test_queries(self, bad, options, row):
        clean = problem_of(mask=self.MASK, **options)
        query = clean.query.clone()
        query[1, 3, row, 0] = bad
        poisoned = dataclasses.replace(clean, query=query)
        (out, _), (clean_out, _) = attention(poisoned), attention(clean)
        grad_out = torch.randn_like(out)
        found, expected = gradients(poisoned, grad_out), gradients(clean, grad_out)
        rest = torch.ones(out.shape[:3], dtype=torch.bool)
        rest[1, 3, row] = not visible_keys(clean)[1, 3, row].any()
        torch.testing.assert_close(out[rest], clean_out[rest])
        torch.testing.assert_close(found["query"][rest], expected["query"][rest])
        keys = torch.ones(2, 2, 7, dtype=torch.bool)
        keys[1, 1] = ~visible_keys(clean)[1, 3, row]
        for name in ("key", "value"):
            torch.testing.assert_close(found[name][keys], expected[name][keys])

    def test_incoming_gradient(self):
        clean = problem_of(mask=self.MASK)
        grad_out = torch.randn(2, 4, 5, 6, dtype=torch.float64)
        expected = gradients(clean, grad_out)
        grad_out[1, 3, 1, 0] = math.nan
        found = gradients(clean, grad_out, row_by_row=True)
        keys = torch.ones(2, 2, 7, dtype=torch.bool)
        keys[1, 1] = ~visible_keys(clean)[1, 3, 1]
        for name in ("key", "value"):
            torch.testing.assert_close(found[name][keys], expected[name][keys])
            assert torch.isnan(found[name][~keys]).any(dim=-1).all()

    def test_everything_seen_is_not_laundered(self):
        problem = problem_of(dropout_p=0.5)
        problem.value[0, 0, 3, 1] = math.nan
        out, _ = attention(problem)
        assert torch.isnan(out[0, :2, :, 1]).all()


def test_a_part_counts_as_the_whole_does():
    """Positions and heads of a part are those of the problem that it is cut from."""
    whole = problem_of(dropout_p=0.5, seed=3)
    (_, heads, rows, _), keys = whole.query.shape, whole.key.shape[2]
    part = dataclasses.replace(
        whole,
        query=whole.query[:, 1:3, 2:],
        key=whole.key[:, :1, 3:6],
        part=Part(query=2, key=3, head=1, heads=heads, diagonal=keys - rows),
    )
    assert torch.equal(kept_entries_of(part), kept_entries_of(whole)[:, 1:3, 2:, 3:6])
    distance = alibi_distance(rows, keys, whole.query.device)[2:, 3:6]
    assert torch.equal(alibi_distance(rows - 2, 3, whole.query.device, part.part), distance)


class TestDtypes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_computes_in_its_own_dtype(self, dtype):
        problem = cast(problem_of(bias=some_bias(), **EVERYTHING), dtype)
        assert problem.bias.dtype == dtype
        assert problem.sinks.dtype == problem.alibi_slopes.dtype == torch.float32
        out, lse = attention(problem)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        exact_out, exact_lse = attention(cast(problem, torch.float64))
        error = (out.double() - exact_out).abs().max().item()
        assert 0 < error < 20 * torch.finfo(dtype).eps * exact_out.abs().max().item()
        assert (lse.double() - exact_lse).abs().max().item() < 20 * torch.finfo(
            dtype
        ).eps * exact_lse.abs().max()
