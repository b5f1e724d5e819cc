"""The calls behind flash-attn's functions: flashtile's own, and what flash-attn returns besides."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flashtile.attention import attention
from flashtile.compat.arguments import Options
from flashtile.compat.errors import named
from flashtile.compat.probabilities import signed_probabilities
from flashtile.dropout import draw_seed, dropout_mask

Outputs = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


def attend(inputs: Sequence[Tensor], options: Options, return_attn_probs: bool, return_lse: bool) -> Outputs:
    """Attention of inputs (batch, heads, length, head_dim); out is (batch, length, heads, head_dim)."""
    query, key, value = inputs
    if return_attn_probs:
        options = _with_seed(options, query)
    out: Tensor
    lse: Tensor
    out, lse = named(attention, query, key, value, **options._asdict(), return_lse=True)
    out = out.transpose(1, 2)
    if not return_attn_probs:
        return (out, lse) if return_lse else out
    kept = None
    if options.seed is not None:
        batch, heads, query_length, _ = query.shape
        kept = dropout_mask(
            options.seed, options.dropout_p, batch, heads, query_length, key.shape[2], query.device
        )
    return out, lse, signed_probabilities(query, key, lse, options, kept)


def _with_seed(options: Options, query: Tensor) -> Options:
    """Whoever asks for the dropped entries needs the seed: drawn as attention() would, so out is the same."""
    return options._replace(seed=int(draw_seed(query.device))) if options.dropout_p else options
