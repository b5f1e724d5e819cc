"""The gradient of the sinks, which follows from the LSE alone: no backend needs a kernel for it."""

from __future__ import annotations

import torch
from torch import Tensor


def gradient_terms(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """What every row adds to the gradient of its head's sink: (B, Hq, Sq), as ``lse`` and ``delta``.

    The sink's probability is exp(sink - LSE), and its value is 0: dS = P (0 - delta).
    """
    sinks = sinks.view(1, -1, 1)
    # A sink of infinity takes everything; inf - inf would be NaN.
    probability = torch.where(sinks == torch.inf, 1.0, torch.exp(sinks - lse))
    # A sink of -inf counts for nothing, even beside a NaN.
    nothing = (lse == -torch.inf) | (sinks == -torch.inf)
    return (-probability * delta).masked_fill(nothing, 0.0)
