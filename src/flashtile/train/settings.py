"""What a run is made of: its model, data and schedule, and shapes by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashtile.checks import check_choice, check_sizes
from flashtile.train.attentions import ATTENTIONS
from flashtile.train.model import Shape

DTYPES = ("fp32", "bf16")  # of the products: bf16 by autocast


@dataclass(frozen=True)
class Settings:
    """Everything that the losses of a run depend on; a checkpoint holds them.

    The defaults learn to write like Hamlet in minutes on two cores.
    """

    preset: str = "play"
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int | None = None
    context: int = 256
    dropout: float = 0.1
    vocabulary: int | None = None  # byte pairs; None: bytes
    text: tuple[str, ...] = ()
    attention: str = "flashtile"
    dtype: str = "fp32"
    steps: int = 1200
    batch: int = 8
    accumulate: int = 1
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    validate_every: int = 100
    validation_rows: int = 64

    def __post_init__(self) -> None:
        for name, known in (("preset", PRESETS), ("attention", ATTENTIONS), ("dtype", DTYPES)):
            check_choice(name, getattr(self, name), known)
        text: object = self.text
        if isinstance(text, str):  # its letters would be taken for paths
            raise TypeError(f"text must be a tuple of paths, got a str; say text=({text!r},)")
        sizes = ("steps", "batch", "accumulate", "validate_every", "validation_rows")
        check_sizes(**{name: getattr(self, name) for name in sizes})
        for name in ("learning_rate", "warmup", "weight_decay", "clip", "seed"):
            number = getattr(self, name)
            if not isinstance(number, (int, float)):
                raise TypeError(f"{name} must be a number, got {number!r}")
            if not 0 <= number < math.inf:
                raise ValueError(f"{name} must be at least 0, got {number}")

    def shape(self, vocabulary: int) -> Shape:
        """The model's, for a tokenizer with so many tokens."""
        return Shape(
            vocabulary, self.layers, self.width, self.heads, self.context, self.kv_heads, self.dropout
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0 on: a linear warm-up, then half a cosine down to a tenth."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def _large(layers: int, width: int, heads: int, rate: float, **others: Any) -> Mapping[str, Any]:
    common = {"context": 2048, "dropout": 0.0, "dtype": "bf16", "batch": 4, "accumulate": 32, "warmup": 500}
    shape = {"layers": layers, "width": width, "heads": heads, "learning_rate": rate}
    return common | {"steps": 20_000, "validate_every": 500} | shape | others


# The sizes and learning rates of GPT-2 (Radford et al., 2019) and GPT-3 (Brown et al., 2020, table 2.1). The
# table's heads for 1.3B, 24 of 128, do not make up its width of 2048; 16 do.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "play": {},
    "gpt2": _large(12, 768, 12, 6e-4, context=1024, batch=16, accumulate=32),
    "gpt3-1.3b": _large(24, 2048, 16, 2e-4),
    "gpt3-2.7b": _large(32, 2560, 32, 1.6e-4, batch=2, accumulate=64),
}
