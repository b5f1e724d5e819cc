"""Partial results over disjoint keys merged into one."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile import masks


def parts(dtype: torch.dtype, ends: tuple[int, ...], requires_grad: bool = False):
    """Inputs, and the results over each run of keys between the ends."""
    query, key, value = (
        torch.randn(2, heads, length, 16).to(dtype).requires_grad_(requires_grad)
        for heads, length in ((4, 9), (2, ends[-1]), (2, ends[-1]))
    )
    results = [
        flashtile.attention(
            query, key, value, mask=masks.key_range(first, last) & masks.window(10, 10, alignment="top-left"),
            return_lse=True,
        )
        for first, last in zip((0, *ends), ends, strict=False)
    ]  # fmt: skip
    return (query, key, value), results


@pytest.mark.parametrize("ends", [(40,), (17, 40), (1, 2, 39, 40), (0, 40, 40)], ids=str)
def test_parts_become_the_whole(ends, dtype):
    """Some parts lie outside some rows' windows, some are empty."""
    inputs, results = parts(dtype, ends)
    out, lse = flashtile.merge(*zip(*results, strict=True))
    expected, expected_lse = flashtile.attention(
        *inputs, mask=masks.window(10, 10, alignment="top-left"), return_lse=True
    )
    # Every part was rounded to the dtype, and the whole is rounded once more.
    eps, largest = torch.finfo(dtype).eps, float(expected.abs().max())
    torch.testing.assert_close(out, expected, rtol=0.0, atol=4 * eps * largest)
    torch.testing.assert_close(lse, expected_lse)
    assert out.dtype == dtype


def test_stacked_tensors():
    _, results = parts(torch.float32, (17, 40))
    outputs, lses = zip(*results, strict=True)
    expected = flashtile.merge(outputs, lses)
    assert all(map(torch.equal, flashtile.merge(torch.stack(outputs), torch.stack(lses)), expected))


def test_the_mean_would_be_wrong():
    """The example of the design: scores [0, 0, ln 3, ln 3] with values [0, 0, 1, 1] give 0.75."""
    outputs = torch.tensor([0.0, 1.0]).view(2, 1, 1)
    lses = torch.tensor([2.0, 6.0]).log().view(2, 1)
    assert flashtile.merge(outputs, lses)[0].item() == pytest.approx(0.75)


def test_rows_that_nobody_saw():
    outputs, lses = torch.full((2, 3, 4), torch.nan), torch.full((2, 3), -torch.inf)
    outputs[1, 2], lses[1, 2] = 5.0, 0.5
    out, lse = flashtile.merge(outputs, lses)
    assert out[:2].eq(0).all()
    assert lse[:2].eq(-torch.inf).all()
    assert out[2].eq(5).all()
    assert lse[2] == 0.5


def test_a_nan_that_was_seen_stays():
    out, lse = flashtile.merge(torch.tensor([[[torch.nan]], [[1.0]]]), torch.tensor([[torch.nan], [0.0]]))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_a_sink_of_infinity_takes_everything():
    lses = torch.tensor([[0.5, -torch.inf], [torch.inf, torch.inf]], requires_grad=True)
    outputs = torch.tensor([[[1.0], [torch.nan]], [[0.0], [0.0]]], requires_grad=True)
    out, lse = flashtile.merge(outputs, lses)
    assert out.eq(0).all()
    assert lse.eq(torch.inf).all()
    grad_outputs, grad_lses = torch.autograd.grad(out.sum() + 3 * lse.sum(), (outputs, lses))
    assert torch.equal(grad_outputs.squeeze(), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert torch.equal(grad_lses, torch.tensor([[0.0, 0.0], [3.0, 3.0]]))


def test_a_nan_stays_beside_a_sink_of_infinity():
    lses, outputs = torch.tensor([[0.5, torch.nan], [torch.inf, torch.inf]]), torch.zeros(2, 2, 1)
    outputs[0] = torch.nan
    out, lse = flashtile.merge(outputs, lses)
    assert out.isnan().all()
    assert lse[0] == torch.inf
    assert lse[1].isnan()


def test_gradients_where_one_part_saw_nothing_and_the_other_little():
    """exp(0 - LSE) would be infinite."""
    lses = torch.tensor([[-1000.0], [-torch.inf]], requires_grad=True)
    outputs = torch.tensor([[[2.0]], [[torch.nan]]], requires_grad=True)
    out, lse = flashtile.merge(outputs, lses)
    grad_outputs, grad_lses = torch.autograd.grad(out.sum() + lse.sum(), (outputs, lses))
    assert torch.equal(grad_outputs.flatten(), torch.tensor([1.0, 0.0]))
    assert torch.equal(grad_lses.flatten(), torch.tensor([1.0, 0.0]))


def test_gradients_are_those_of_the_whole():
    inputs, results = parts(torch.float64, (5, 20, 40), requires_grad=True)
    merged = flashtile.merge(*zip(*results, strict=True))
    whole = flashtile.attention(*inputs, mask=masks.window(10, 10, alignment="top-left"), return_lse=True)
    upstream = [torch.randn_like(tensor) for tensor in whole]
    found = torch.autograd.grad(merged, inputs, upstream)
    for gradient, expected in zip(found, torch.autograd.grad(whole, inputs, upstream), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_gradcheck_with_rows_unseen_in_some_parts():
    outputs, lses = torch.randn(3, 4, 2, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    lses[0, 1] = lses[:2, 2] = -torch.inf
    lses[:, 3] = -torch.inf
    seen = lses != -torch.inf

    def function(outputs, finite):
        out, lse = flashtile.merge(outputs, torch.where(seen, finite, -torch.inf))
        return out, lse[:3]

    leaves = [outputs.requires_grad_(), lses.nan_to_num(neginf=0.0).requires_grad_()]
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize(
    ("outputs", "lses", "error", "message"),
    [
        ([], [], ValueError, "outputs must hold at least one tensor, got none"),
        (3, [torch.zeros(2)], TypeError, "outputs must be a tensor or a sequence of tensors, got int"),
        ([torch.zeros(2, 3)], [3], TypeError, "lses must hold tensors, got int"),
        (
            [torch.zeros(2, 3)],
            [torch.zeros(2)] * 2,
            ValueError,
            "lses must have one LSE per output, 1, got 2",
        ),
        (
            [torch.zeros(2, 3), torch.zeros(2, 4)],
            [torch.zeros(2)] * 2,
            ValueError,
            r"shape \(2, 3\) each, got",
        ),
        (
            [torch.zeros(2, 3)],
            [torch.zeros(3)],
            ValueError,
            r"lses must have shape \(2,\) each, got shape \(3,\)",
        ),
        ([torch.zeros(2, 3)], [torch.zeros(2).double()], TypeError, "lses must have the dtype torch.float32"),
        ([torch.zeros(2, 3).int()], [torch.zeros(2)], TypeError, "outputs must have one of the dtypes"),
    ],
)
def test_refusals(outputs, lses, error, message):
    with pytest.raises(error, match=message):
        flashtile.merge(outputs, lses)
