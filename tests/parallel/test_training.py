"""What training adds: drawn seeds, checkpoints, autocast, torch.compile, FSDP (and DDP: the example)."""

from __future__ import annotations

import torch

import flashtile
from tests.parallel.jobs import drop_with_a_drawn_seed, train_compiled_under_autocast, train_fully_sharded


def test_without_a_seed_that_of_the_first_rank_counts(ranks):
    """Every rank has a generator of its own, and all of them drop what one process would."""
    kept = torch.cat(ranks.run(drop_with_a_drawn_seed, 4), dim=2) != 0
    torch.manual_seed(3)
    seed = flashtile.dropout.draw_seed("cpu")
    assert torch.equal(kept, flashtile.dropout_mask(seed, 0.5, 1, 2, 16, 16))


def test_checkpoint_autocast_and_compile(ranks):
    for found in ranks.run(train_compiled_under_autocast, 3):
        eager, compiled = found[: len(found) // 2], found[len(found) // 2 :]
        assert all(map(torch.equal, eager, compiled))


def test_a_step_of_fsdp(ranks):
    for found in ranks.run(train_fully_sharded, 4):
        for weights, expected in found.values():
            torch.testing.assert_close(weights, expected)
