"""The papers step by step: online softmax of one row, three algorithms counted, and what theory says."""

from __future__ import annotations

import math

import torch

import flashtile
from flashtile import lab, masks
from flashtile.lab import theory

LENGTH, HEAD_DIM, SRAM = 200, 16, 4 * 1024


def one_row() -> None:
    """Scores [0, 0, ln 3, ln 3] with values [0, 0, 1, 1], two keys at a time."""
    scores = torch.tensor([0.0, 0.0, math.log(3), math.log(3)])
    values = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    for step in lab.steps(scores, values, block=2):
        state = f"m {step.row_max:.3f}, l {step.row_sum:.3f}, u {step.unnormalised.item():.3f}"
        answer = f"rescaled by {step.rescale:.3f}, answer {step.answer.item():.3f}"
        print(f"keys {step.keys.start} to {step.keys.stop - 1}: {state}, {answer}")
    wrong = lab.mean_of_blocks(scores, values, block=2)
    print(f"the mean of the two blocks would be {wrong.item():.3f}")
    torch.testing.assert_close(step.answer, scores.softmax(0) @ values)
    torch.testing.assert_close(wrong, torch.tensor([0.5]))


def three_algorithms() -> None:
    """Forward and backward, causal, with dropout: the same results, not the same traffic."""
    torch.manual_seed(0)
    query, key, value, grad_out = torch.randn(4, 1, 2, LENGTH, HEAD_DIM, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    options = {"mask": masks.causal(), "dropout_p": 0.1, "seed": 7}
    expected = flashtile.attention(*leaves, **options)
    gradients = torch.autograd.grad(expected, leaves, grad_out)

    shape = theory.Shape(
        query_length=LENGTH, key_length=LENGTH, head_dim=HEAD_DIM, value_head_dim=HEAD_DIM,
        upper=0, dropout=True,
    )  # fmt: skip
    for algorithm in lab.ALGORITHMS:
        blocks = [theory.block_sizes(algorithm, direction, SRAM, HEAD_DIM) for direction in theory.DIRECTIONS]
        run = lab.run(
            algorithm, query, key, value, grad_out, blocks=blocks[0], backward_blocks=blocks[1], **options
        )
        for ours, theirs in zip((run.out, *run.gradients), (expected, *gradients), strict=True):
            torch.testing.assert_close(ours, theirs)
        for direction, tile, counts in zip(
            theory.DIRECTIONS, blocks, (run.forward, run.backward), strict=True
        ):
            assert counts == theory.one_pass(algorithm, direction, shape, tile).counts.times(2)
            print(
                f"{algorithm:<8} {direction:<8} {counts.traffic:>9,} bytes, {counts.matmul:>10,} FLOPs of "
                f"matrix products, {counts.other:>7,} others"
            )


def longer_sequences() -> None:
    """What theory says where nobody wants to wait: a head of dimension 64 on an A100's 192 KB."""
    for length in (1024, 16_384, 262_144):
        shape = theory.Shape(query_length=length, key_length=length, head_dim=64, value_head_dim=64)
        moved = {}
        for algorithm in lab.ALGORITHMS:
            blocks = theory.block_sizes(algorithm, "forward", 192 * 1024, 64)
            moved[algorithm] = theory.one_pass(algorithm, "forward", shape, blocks).counts.traffic
        shares = ", ".join(f"{name} {1e-9 * size:.4g} GB" for name, size in moved.items())
        print(f"length {length:>7,}: {shares}")
        assert moved["flash2"] < moved["flash1"] < moved["standard"] / 4


if __name__ == "__main__":
    one_row()
    three_algorithms()
    longer_sequences()
