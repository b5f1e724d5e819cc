"""The least time that a card can take for given counts: a roofline of three ceilings.

Matrix products run on the matrix units, all other FLOPs on the vector units, bytes through the memory; the
slowest of the three is the bound, as if they overlapped perfectly and an exponential cost one FLOP. A real
kernel takes longer: this says what limits it, not how long it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flashtile.lab.memory import Counts

Dtype = Literal["fp16", "bf16", "fp32"]
ELEMENT_SIZE: dict[Dtype, int] = {"fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Card:
    """Peaks in FLOP/s and bytes/s, and where they are from."""

    name: str
    matmul: Mapping[Dtype, float]
    vector: float
    bandwidth: float
    source: str

    def attainable(self, intensity: float, dtype: Dtype) -> float:
        """FLOP/s at so many FLOPs of matrix products for each byte."""
        return min(self.matmul[dtype], intensity * self.bandwidth)


@dataclass(frozen=True)
class Bound:
    """Seconds that each part takes at its peak."""

    matmul: float
    other: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self.matmul, self.other, self.memory)

    @property
    def limited_by(self) -> str:
        return max(vars(self).items(), key=lambda part: part[1])[0]


def _nvidia(name: str, half: float, single: float, bandwidth: float, source: str) -> Card:
    return Card(
        name,
        {"fp16": half * 1e12, "bf16": half * 1e12, "fp32": single * 1e12},
        single * 1e12,
        bandwidth * 1e9,
        source,
    )


# fp32 products are taken to run on the vector units, exactly; TF32 would be faster and is another arithmetic.
CARDS = {
    "a100": _nvidia("A100", 312, 19.5, 2039, "NVIDIA's data sheet of the A100 80GB SXM"),
    "h100": _nvidia(
        "H100", 989.5, 67, 3350, "NVIDIA's data sheet of the H100 SXM; half of fp16 with sparsity"
    ),
    "h200": _nvidia(
        "H200", 989.5, 67, 4800, "NVIDIA's data sheet of the H200 SXM; half of fp16 with sparsity"
    ),
}


def this_cpu(threads: int) -> Card:
    """This processor on so many threads, measured; takes seconds."""
    from flashtile.bench import ceilings, machine

    measured = ceilings.measure(threads)
    fma = (measured["fma_gflops"] or 0.0) * 1e9
    dot = (measured["bf16_dot_gflops"] or 0.0) * 1e9
    return Card(
        "this CPU",
        {"fp16": fma, "bf16": dot or fma, "fp32": fma},
        fma,
        (measured["read_gb_per_s"] or 0.0) * 1e9,
        f"measured: {machine.cpu_name()}, {threads} thread{'s' if threads > 1 else ''}",
    )


def bound(card: Card, counts: Counts, dtype: Dtype) -> Bound:
    """The roofline of these counts, whose bytes are those of ``dtype``."""
    return Bound(
        counts.matmul / card.matmul[dtype], counts.other / card.vector, counts.traffic / card.bandwidth
    )
