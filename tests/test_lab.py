"""The papers' algorithms: equal to the oracle for any blocks, and counted as they are written."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest
import torch
from torch import Tensor

from flashtile import lab, masks, reference
from flashtile.lab.algorithms import band
from flashtile.problem import AttentionProblem
from tests.oracle import assert_close_to_oracle, random_gradients, random_problem

MASKS = {
    "none": None,
    "causal": masks.causal(alignment="bottom-right"),
    "top-left": masks.causal(alignment="top-left"),
    "window": masks.window(left=3, right=1, alignment="top-left"),
    "bottom window": masks.window(left=3, right=1, alignment="bottom-right"),
}
FLASH = ("flash1", "flash2")


def results(problem: AttentionProblem, grad_out: Tensor, run: lab.Run) -> dict[str, Tensor]:
    assert run.gradients is not None
    names = ("grad_query", "grad_key", "grad_value")
    return {"out": run.out, **dict(zip(names, run.gradients, strict=True))}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("algorithm", lab.ALGORITHMS)
def test_equal_to_the_oracle_forward_and_backward(algorithm, mask, dropout_p, dtype):
    lengths, blocks = (29, 21), lab.Blocks(8, 5)
    lower, upper = band(mask, *lengths)
    problem = random_problem(
        heads=3, kv_heads=3, query_length=lengths[0], key_length=lengths[1], head_dim=6, value_head_dim=4,
        lower=lower, upper=upper, dropout_p=dropout_p, seed=11, dtype=dtype,
    )  # fmt: skip
    grad_out, _ = random_gradients(problem)
    run = lab.run(
        algorithm, problem.query, problem.key, problem.value, grad_out,
        blocks=blocks, mask=mask, dropout_p=dropout_p, seed=11,
    )  # fmt: skip
    assert_close_to_oracle(results(problem, grad_out, run), problem, grad_out)


@pytest.mark.parametrize("blocks", list(product((1, 3, 7, 64), (1, 4, 9, 64))), ids=str)
@pytest.mark.parametrize("algorithm", FLASH)
def test_blocks_of_any_size_change_nothing(algorithm, blocks):
    query, key, value, grad_out = torch.randn(4, 1, 1, 13, 5, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    out, _ = reference.attention(AttentionProblem(*leaves, 0.7, upper=0, dropout_p=0.2, seed=3))
    run = lab.run(
        algorithm, query, key, value, grad_out,
        blocks=lab.Blocks(*blocks), mask=masks.causal(), scale=0.7, dropout_p=0.2, seed=3,
    )  # fmt: skip
    assert run.gradients is not None
    exact = (out, *torch.autograd.grad(out, leaves, grad_out))
    for found, expected in zip((run.out, *run.gradients), exact, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("algorithm", lab.ALGORITHMS)
def test_large_scores_do_not_overflow(algorithm):
    query, key, value = torch.randn(3, 1, 1, 20, 4, dtype=torch.float64)
    run = lab.run(algorithm, 1e4 * query, key, value, blocks=lab.Blocks(4, 4))
    out, _ = reference.attention(AttentionProblem(1e4 * query, key, value, 0.5))
    torch.testing.assert_close(run.out, out)


@pytest.mark.parametrize("algorithm", lab.ALGORITHMS)
def test_a_row_without_keys_gives_zeros(algorithm):
    query, key, value, grad_out = torch.ones(4, 1, 1, 6, 2, dtype=torch.float64)
    mask = masks.causal(alignment="bottom-right")
    run = lab.run(
        algorithm, query, key[:, :, :2], value[:, :, :2], grad_out, blocks=lab.Blocks(4, 4), mask=mask
    )
    assert run.gradients is not None
    assert run.out[0, 0, :4].count_nonzero() == 0
    assert run.out[0, 0, 4:].eq(1).all()
    assert run.gradients[0][0, 0, :4].count_nonzero() == 0
    assert all(gradient.isfinite().all() for gradient in run.gradients)


def test_flash2_keeps_the_lse_and_flash1_sum_and_maximum():
    query, key, value = torch.randn(3, 9, 4, dtype=torch.float64)
    setting, blocks = lab.Setting(scale=0.5), lab.Blocks(4, 2)
    scores = 0.5 * query @ key.mT
    _, row_sum, row_max = lab.flash1.forward(query, key, value, blocks, setting, lab.Memory())
    _, lse = lab.flash2.forward(query, key, value, blocks, setting, lab.Memory())
    torch.testing.assert_close(row_max[:, 0], scores.amax(1))
    torch.testing.assert_close(row_sum[:, 0], (scores - scores.amax(1, keepdim=True)).exp().sum(1))
    torch.testing.assert_close(lse[:, 0], scores.logsumexp(1))


def test_flash2_reads_keys_and_values_once_for_each_block_of_queries():
    query, key, value = torch.randn(3, 1, 1, 50, 8)
    for rows in (1, 7, 25, 50, 80):
        run = lab.run("flash2", query, key, value, blocks=lab.Blocks(rows, 16), element_size=1)
        assert run.forward.read == 50 * 8 + math.ceil(50 / rows) * (50 * 8 + 50 * 8)
        assert run.forward.written == 50 * 8 + 50


def test_causal_flash2_reads_no_block_of_keys_that_it_skips():
    query, key, value = torch.randn(3, 1, 1, 40, 8)
    run = lab.run("flash2", query, key, value, blocks=lab.Blocks(10, 10), mask=masks.causal(), element_size=1)
    assert run.forward.read == 40 * 8 + (1 + 2 + 3 + 4) * 10 * (8 + 8)


def test_memory_counts_what_moves_and_what_is_computed():
    memory = lab.Memory(element_size=4)
    large = torch.arange(12.0).view(3, 4)
    block = memory.load(large[:2])
    product = block @ block.T
    half = (product * 0.5 + product - product) / (product + product)
    memory.resident(block, product)
    memory.resident(product)
    memory.store(large[:2, :2], half.exp().rescaled(half))
    assert memory.counts == lab.Counts(
        read=8 * 4, written=4 * 4, matmul=2 * 2 * 4 * 2, exponentials=4, divisions=4, rescaling=4,
        arithmetic=4 * 4, on_chip=(8 + 4) * 4,
    )  # fmt: skip
    assert memory.counts.other == 28
    assert memory.counts.traffic == 48
    assert memory.counts.intensity == (32 + 28) / 48
    torch.testing.assert_close(large[:2, :2], torch.full((2, 2), math.exp(0.25) * 0.25))


def test_what_is_loaded_does_not_change_with_the_memory():
    memory, large = lab.Memory(), torch.zeros(2, 2)
    block = memory.load(large)
    large.fill_(1)
    assert block.tensor.count_nonzero() == 0


def test_results_and_scratch_are_written_only_if_filled():
    memory = lab.Memory(element_size=2)
    assert memory.result((3, 4), torch.ones(1)).isnan().all()
    assert memory.counts == lab.Counts()
    assert memory.scratch((3, 1), torch.ones(1), fill=0.0).eq(0).all()
    assert memory.counts == lab.Counts(written=6, intermediate=6)


def test_counts_add_up_one_pass_after_the_other():
    first, second = lab.Counts(read=1, matmul=2, on_chip=7), lab.Counts(read=10, divisions=5, on_chip=3)
    assert first + second == lab.Counts(read=11, matmul=2, divisions=5, on_chip=7)
    assert second.times(3) == lab.Counts(read=30, divisions=15, on_chip=3)
    assert lab.Counts().intensity == 0


def test_online_softmax_of_one_row_step_by_step():
    log3 = math.log(3)
    scores = torch.tensor([0.0, 0.0, log3, log3], dtype=torch.float64)
    values = torch.tensor([[0.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
    first, second = lab.steps(scores, values, block=2)
    assert (first.row_max, first.row_sum, first.rescale, first.answer) == (0, 2, 0, 0)
    torch.testing.assert_close(second.row_max.item(), log3)
    torch.testing.assert_close(second.rescale.item(), 1 / 3)
    torch.testing.assert_close(second.row_sum.item(), 2 / 3 + 2)
    torch.testing.assert_close(second.unnormalised.item(), 2.0)
    torch.testing.assert_close(second.answer.item(), 0.75)
    assert second.keys == slice(2, 4)
    torch.testing.assert_close(lab.mean_of_blocks(scores, values, block=2).item(), 0.5)
    for block in (1, 2, 3, 4, 9):
        torch.testing.assert_close(lab.blocked(scores, values, block).item(), 0.75)
    torch.testing.assert_close(lab.elementwise(scores, values).item(), 0.75)


@pytest.mark.parametrize("hidden", ["none", "first", "last", "all"])
def test_every_recurrence_is_attention_over_the_keys_so_far(hidden):
    scores, values = 5 * torch.randn(23, dtype=torch.float64), torch.randn(23, 3, dtype=torch.float64)
    scores[
        {"none": slice(0), "first": slice(9), "last": slice(9, None), "all": slice(None)}[hidden]
    ] = -math.inf

    def attention(keys: int) -> Tensor:
        visible = scores[:keys] != -math.inf
        return torch.softmax(scores[:keys][visible], 0) @ values[:keys][visible]

    torch.testing.assert_close(lab.elementwise(scores, values), attention(23))
    for block in (1, 4, 23):
        for step in lab.steps(scores, values, block):
            torch.testing.assert_close(step.answer, attention(step.keys.stop))
            torch.testing.assert_close(step.scores, scores[step.keys])
            assert step.weights.isfinite().all()


def test_rescaling_is_one_where_the_maximum_stays():
    steps = lab.steps(torch.tensor([3.0, 1.0, 2.0, 4.0]), torch.ones(4, 1), block=1)
    assert [step.rescale.item() == 1 for step in steps] == [False, True, True, False]


QUERY = torch.zeros(1, 1, 4, 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"algorithm": "flash3"}, ValueError, "must be one of standard, flash1, flash2, got 'flash3'"),
        ({"query": QUERY[0]}, ValueError, "query must be (batch, heads, length, head_dim), none of them 0"),
        ({"key": QUERY[:, :, :0]}, ValueError, "none of them 0, got shape (1, 1, 0, 2)"),
        ({"key": QUERY.double()}, TypeError, "key must have query's floating-point dtype, got torch.float64"),
        ({"value": "V"}, TypeError, "value must be a torch.Tensor, got str"),
        ({"key": QUERY[..., :1]}, ValueError, "key must have the head_dim of query, 2"),
        ({"query": QUERY.expand(1, 2, 4, 2)}, ValueError, "must have the batch and heads of query, (1, 2)"),
        ({"grad_out": QUERY[..., :1]}, ValueError, "grad_out must be (1, 1, 4, 2) of torch.float32"),
        ({"mask": masks.key_lengths([1])}, ValueError, "mask must be causal, a window or both in the lab"),
        ({"mask": torch.ones(4, 4)}, TypeError, "mask must be a flashtile.Mask, got Tensor"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p must be in [0, 1], got 1.5"),
        ({"element_size": 0}, ValueError, "element_size must be at least 1, got 0"),
        ({"element_size": 2.5}, TypeError, "element_size must be an int, got 2.5"),
        ({"blocks": (2, 2)}, TypeError, "blocks must be a flashtile.lab.Blocks, as in lab.Blocks(64, 32)"),
        ({"backward_blocks": (2, 2, 2)}, TypeError, "backward_blocks must be a flashtile.lab.Blocks"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_input_is_refused(change, error, message):
    arguments = {
        "algorithm": "flash2",
        "query": QUERY,
        "key": QUERY,
        "value": QUERY,
        "blocks": lab.Blocks(2, 2),
    }
    with pytest.raises(error) as raised:
        lab.run(**arguments | change)
    assert message in str(raised.value)


def test_bad_blocks_targets_and_rows_are_refused():
    with pytest.raises(ValueError, match=r"blocks\.columns must be at least 1, got 0"):
        lab.Blocks(1, 0)
    for size in (2.0, "2", True, (2, 2)):
        with pytest.raises(TypeError, match=re.escape(f"blocks.rows must be an int, got {size!r}")):
            lab.Blocks(size, 1)
    memory = lab.Memory()
    with pytest.raises(ValueError, match=r"block must have the shape of target, \(2, 1\), got \(2, 2\)"):
        memory.store(torch.zeros(2, 1), memory.load(torch.zeros(2, 2)))
    scores, values = torch.zeros(3), torch.zeros(3, 1)
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        lab.steps(scores, values, 0)
    with pytest.raises(TypeError, match=r"block must be an int, got 1\.5"):
        lab.steps(scores, values, 1.5)
    with pytest.raises(ValueError, match=r"scores must be \(keys,\) with at least one key"):
        lab.elementwise(scores[:0], values[:0])
    with pytest.raises(ValueError, match=r"values must be \(keys, head_dim\) with 3 keys"):
        lab.blocked(scores, values[:2], 1)
    with pytest.raises(TypeError, match="scores and values must have one floating-point dtype"):
        lab.mean_of_blocks(scores, values.double(), 1)
