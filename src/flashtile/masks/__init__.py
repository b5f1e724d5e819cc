"""Which keys a query may see. Masks know no lengths, compose with ``&``, and draw themselves:
``python -m flashtile.masks`` shows them all."""

from flashtile.masks.intervals import Intervals
from flashtile.masks.kinds import (
    Mask,
    causal,
    chunks,
    documents,
    from_dense,
    key_lengths,
    key_range,
    key_starts,
    prefix,
    window,
)

__all__ = [
    "Intervals",
    "Mask",
    "causal",
    "chunks",
    "documents",
    "from_dense",
    "key_lengths",
    "key_range",
    "key_starts",
    "prefix",
    "window",
]
