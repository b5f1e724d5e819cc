"""What `flashtile lab` prints: the three algorithms for any shape, from the closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from flashtile.bench.console import table
from flashtile.bench.timing import format_seconds
from flashtile.lab import paper, theory
from flashtile.lab.algorithms import ALGORITHMS, Algorithm
from flashtile.lab.memory import Counts
from flashtile.lab.roofline import ELEMENT_SIZE, Card, Dtype, bound
from flashtile.lab.setting import Blocks
from flashtile.lab.theory import DIRECTIONS, Direction, Pass, Shape

TITLES: dict[Algorithm, str] = {
    "standard": "standard",
    "flash1": "FlashAttention",
    "flash2": "FlashAttention-2",
}


@dataclass(frozen=True)
class Case:
    """A call to count: equal lengths, equal head dims; ``blocks`` None takes them from the ``sram`` bytes."""

    length: int
    head_dim: int
    sram: int
    batch: int = 1
    heads: int = 1
    causal: bool = False
    dtype: Dtype = "fp16"
    blocks: Blocks | None = None

    @property
    def element_size(self) -> int:
        return ELEMENT_SIZE[self.dtype]

    @property
    def shape(self) -> Shape:
        return Shape(
            query_length=self.length,
            key_length=self.length,
            head_dim=self.head_dim,
            value_head_dim=self.head_dim,
            upper=0 if self.causal else None,
        )

    def blocks_of(self, algorithm: Algorithm, direction: Direction) -> Blocks:
        return self.blocks or theory.block_sizes(
            algorithm, direction, self.sram, self.head_dim, self.element_size
        )

    def one_pass(self, algorithm: Algorithm, direction: Direction) -> Pass:
        """One pass of one head."""
        blocks = self.blocks_of(algorithm, direction)
        return theory.one_pass(algorithm, direction, self.shape, blocks, self.element_size)

    def counts(self, algorithm: Algorithm, direction: Direction | None = None) -> Counts:
        """The counts of all heads; of both passes without a direction."""
        if direction is not None:
            return self.one_pass(algorithm, direction).counts.times(self.batch * self.heads)
        return self.counts(algorithm, "forward") + self.counts(algorithm, "backward")

    def __str__(self) -> str:
        mask = "causal" if self.causal else "no mask"
        where = f"blocks of {_blocks(self.blocks)}" if self.blocks else f"{_bytes(self.sram)} on chip"
        return (
            f"{self.length} queries and keys, head_dim {self.head_dim}, batch {self.batch}, "
            f"{self.heads} head{'s' if self.heads > 1 else ''}, {self.dtype}, {mask}, {where}"
        )


def text(case: Case, cards: Sequence[Card]) -> str:
    """The tables, and what to see in them."""
    parts = [
        str(case),
        _traffic_table(case),
        _flops_table(case),
        _remarks(case),
        _roofline_table(case, cards),
    ]
    return "\n\n".join(parts)


def as_dict(case: Case, cards: Sequence[Card]) -> dict[str, Any]:
    """The same for JSON: bytes, FLOPs and seconds."""
    return {
        "case": asdict(case),
        "passes": [
            {
                "algorithm": algorithm,
                "direction": direction,
                "blocks": None if algorithm == "standard" else asdict(case.blocks_of(algorithm, direction)),
                **_numbers(case.counts(algorithm, direction)),
                "numbers_moved_by_a_head": asdict(case.one_pass(algorithm, direction).moves),
            }
            for algorithm in ALGORITHMS
            for direction in DIRECTIONS
        ],
        "saved_by_flash2_forward_on_equal_blocks": _saved(case),
        "roofline": [
            {
                "card": card.name,
                "source": card.source,
                "algorithm": algorithm,
                "seconds": asdict(limits := bound(card, case.counts(algorithm), case.dtype)),
                "limited_by": limits.limited_by,
            }
            for card in cards
            for algorithm in ALGORITHMS
        ],
    }


def paper_text() -> str:
    """The first paper's example beside the model."""
    rows = [
        [line.quantity, f"{line.paper:.1f} {line.unit}", f"{line.model:.1f} {line.unit}"]
        for line in paper.comparison()
    ]
    title = (
        f"FlashAttention, Figure 2 left: N = {paper.LENGTH}, d = {paper.HEAD_DIM}, {paper.HEADS} heads, "
        f"batch {paper.BATCH}, fp16, A100, forward and backward"
    )
    operators = [[what, f"{passes:g}"] for what, passes in paper.OPERATORS]
    return "\n".join(
        [
            title,
            table(["", "paper", "model"], rows),
            *[f"  {note}" for note in paper.notes()],
            "",
            table(["standard attention by operators", "N x N passes"], operators),
        ]
    )


def paper_as_dict() -> dict[str, Any]:
    return {"comparison": [asdict(line) for line in paper.comparison()], "notes": paper.notes()}


def _traffic_table(case: Case) -> str:
    header = ["traffic", "tile", "read", "written", "largest part", "FLOP/byte", "on chip", "scratch"]
    rows = []
    for direction, algorithm in product(DIRECTIONS, ALGORITHMS):
        counts, moves = case.counts(algorithm, direction), case.one_pass(algorithm, direction).moves
        share = getattr(moves, moves.dominant) / moves.total
        rows.append(
            [
                f"{TITLES[algorithm]}, {direction}",
                "-" if algorithm == "standard" else _blocks(_fitted(case, algorithm, direction)),
                _bytes(counts.read),
                _bytes(counts.written),
                f"{moves.dominant.replace('_', ' ')} {share:.0%}",
                f"{counts.intensity:.1f}",
                _bytes(counts.on_chip) if counts.on_chip else "-",
                _bytes(counts.intermediate),
            ]
        )
    return table(header, rows)


def _flops_table(case: Case) -> str:
    header = ["FLOPs", "matrix products", "exp, log", "divisions", "rescaling", "other"]
    rows = []
    for direction, algorithm in product(DIRECTIONS, ALGORITHMS):
        counts = case.counts(algorithm, direction)
        flops = (counts.matmul, counts.exponentials, counts.divisions, counts.rescaling, counts.arithmetic)
        rows.append([f"{TITLES[algorithm]}, {direction}", *[_si(number) for number in flops]])
    return table(header, rows)


def _remarks(case: Case) -> str:
    traffic = {name: case.counts(name).traffic for name in ALGORITHMS}
    shares = [f"{TITLES[name]} {traffic[name] / traffic['standard']:.1%}" for name in ALGORITHMS[1:]]
    remarks = [
        f"Of the bytes of standard attention, forward and backward: {', '.join(shares)}.",
        f"On FlashAttention's tiles, FlashAttention-2 does {_si(_saved(case))} fewer FLOPs forward outside "
        "matrix products.",
    ]
    if case.blocks is None:
        remarks.append(
            "Its own have more rows and fewer columns: fewer bytes, more rescaling. --blocks compares on "
            "equal ones."
        )
        most = max(case.counts(name).on_chip for name in ALGORITHMS)
        if most > case.sram:
            remarks.append(
                f"A tile takes up to {_bytes(most)}: the rule counts a block each of Q, K, V and O, no "
                "scores and no gradients."
            )
    return "\n".join(f"  {remark}" for remark in remarks)


def _roofline_table(case: Case, cards: Sequence[Card]) -> str:
    rows = []
    for algorithm in ALGORITHMS:
        bounds = [bound(card, case.counts(algorithm), case.dtype) for card in cards]
        rows.append([TITLES[algorithm], *[f"{format_seconds(b.seconds)} {b.limited_by}" for b in bounds]])
    header = ["at least, both passes", *[card.name for card in cards]]
    sources = [
        f"  {card.name}: {card.matmul[case.dtype] / 1e12:.4g} TFLOP/s {case.dtype}, {card.vector / 1e12:.3g} "
        f"TFLOP/s vector, {card.bandwidth / 1e9:.4g} GB/s ({card.source})"
        for card in cards
    ]
    return "\n".join([table(header, rows), *sources])


def _saved(case: Case) -> int:
    one_head = theory.saved_by_flash2(case.shape, case.blocks_of("flash1", "forward"))
    return one_head * case.batch * case.heads


def _fitted(case: Case, algorithm: Algorithm, direction: Direction) -> Blocks:
    blocks = case.blocks_of(algorithm, direction)
    return Blocks(min(blocks.rows, case.length), min(blocks.columns, case.length))


def _numbers(counts: Counts) -> dict[str, Any]:
    return {**asdict(counts), "flops": counts.flops, "intensity": counts.intensity}


def _blocks(blocks: Blocks) -> str:
    return f"{blocks.rows}x{blocks.columns}"


def _bytes(size: float) -> str:
    """A size with four digits and a binary prefix, as memories have them."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1023.5 or unit == "PiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def _si(number: float) -> str:
    """A number with three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.5 or prefix == "P":
            break
        number /= 1000
    return f"{number:.3g} {prefix}".rstrip()
