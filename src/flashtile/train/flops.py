"""What training costs: the paper's count of operations, and the share of it that is attention."""

from __future__ import annotations

import torch

from flashtile.lab.roofline import CARDS, Card
from flashtile.train.model import Shape


def model_flops(shape: Shape, *, causal: bool = False) -> float:
    """Operations per token of a training step, forward and backward: ``6 N + 12 L d S``.

    N parameters, each multiplied and added once forward and twice backward; L layers of width d; S the
    context (FlashAttention-2, section 4.2, after Megatron-LM). The paper counts every score; with ``causal``
    only the half that is seen counts: ``6 N + 6 L d S``. Nothing that is recomputed counts.
    """
    return 6.0 * shape.parameters + attention_flops(shape, causal=causal)


def attention_flops(shape: Shape, *, causal: bool = False) -> float:
    """The part of it that is attention, without the projections: ``12 L d S``, or half of it."""
    return (6.0 if causal else 12.0) * shape.layers * shape.width * shape.context


def attention_share(shape: Shape) -> float:
    """Attention's share, 0 to 1, of the operations that a causal model needs."""
    return attention_flops(shape, causal=True) / model_flops(shape, causal=True)


def predicted_speedup(share: float, speedup: float) -> float:
    """How many times as fast a step gets when attention, ``share`` of its work, gets ``speedup`` times so.

    Amdahl's law, with the faster attention running at the rate of everything else.
    """
    return 1.0 - share + share * speedup


def known_card(device: torch.device) -> Card | None:
    """The data-sheet numbers of the GPU; None for a CPU and for cards of which we have none."""
    if device.type != "cuda":
        return None
    own = torch.cuda.get_device_name(device).upper()
    return next((card for card in CARDS.values() if card.name in own), None)
