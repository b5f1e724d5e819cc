"""How the second paper splits the work: over thread blocks (section 3.2) and over warps (section 3.3).

A GPU runs thread blocks on its multiprocessors. FlashAttention makes one for each head of each batch entry;
FlashAttention-2 one for each block of the outer loop as well: of queries forward, of keys backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.checks import check_choice, check_sizes
from flashtile.lab.algorithms import ALGORITHMS, Algorithm
from flashtile.lab.setting import Blocks, check_blocks
from flashtile.lab.theory import DIRECTIONS, Direction

TILED = ALGORITHMS[1:]  # the two FlashAttentions

# Streaming multiprocessors, from NVIDIA's data sheets of the cards in `roofline.CARDS`.
MULTIPROCESSORS = {"a100": 108, "h100": 132, "h200": 132}


@dataclass(frozen=True)
class Occupancy:
    """Thread blocks on the ``places`` that a card has for them, as if each took equally long."""

    thread_blocks: int
    places: int

    @property
    def rounds(self) -> int:
        """How many times the places are filled, the last time perhaps not all of them."""
        return -(-self.thread_blocks // self.places)

    @property
    def at_first(self) -> float:
        """The share of the places that work in the first round."""
        return min(1.0, self.thread_blocks / self.places)

    @property
    def mean(self) -> float:
        """The same over all rounds."""
        return self.thread_blocks / (self.rounds * self.places)


def occupancy(
    algorithm: Algorithm,
    direction: Direction,
    heads: int,
    length: int,
    blocks: Blocks,
    multiprocessors: int,
    per_multiprocessor: int = 1,
) -> Occupancy:
    """The thread blocks of one of the two FlashAttentions.

    ``heads`` counts those of all batch entries, ``length`` queries and as many keys; a multiprocessor takes
    ``per_multiprocessor`` thread blocks at once. A ValueError for another algorithm or direction, or a size
    below 1.
    """
    check_choice("algorithm", algorithm, TILED)
    check_choice("direction", direction, DIRECTIONS)
    check_blocks("blocks", blocks)
    check_sizes(
        heads=heads,
        length=length,
        multiprocessors=multiprocessors,
        per_multiprocessor=per_multiprocessor,
    )
    size = blocks.rows if direction == "forward" else blocks.columns
    split = -(-length // size) if algorithm == "flash2" else 1
    return Occupancy(heads * split, multiprocessors * per_multiprocessor)


def exchanged_by_warps(algorithm: Algorithm, blocks: Blocks, value_head_dim: int, warps: int = 4) -> int:
    """Numbers that the warps write to shared memory to add up one tile's P V in the forward pass.

    FlashAttention splits the keys among them, so each holds a part of every output's sum; FlashAttention-2
    splits the queries, and each holds whole outputs of its own. A ValueError for another algorithm, or a size
    below 1.
    """
    check_choice("algorithm", algorithm, TILED)
    check_blocks("blocks", blocks)
    check_sizes(value_head_dim=value_head_dim, warps=warps)
    return warps * blocks.rows * value_head_dim if algorithm == "flash1" else 0
