"""FlashAttention-1's schedule as a Triton kernel, so that what FlashAttention-2 changed can be measured.

The same tiles and the same online softmax as flashtile's forward pass, but, as the first paper has it, one
program for each batch entry and head, which works through all its queries, and an output that is normalised
after every tile of keys. (FlashAttention-2, sections 3.1 and 3.2, says what that costs: long sequences come
with few heads, which leave most of a GPU idle, and the divisions are no matrix products.)
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def flash1_forward(
    query: "tl.tensor",
    key: "tl.tensor",
    value: "tl.tensor",
    out: "tl.tensor",
    length: "tl.tensor",
    scale: "tl.tensor",
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All queries of one head. Every tensor is contiguous (heads, length, HEAD_DIM); tiles divide the length.

    scale: of the scores, in units of log 2.
    """
    start = tl.program_id(0).to(tl.int64) * length * HEAD_DIM
    column = tl.arange(0, HEAD_DIM)
    for first_query in range(0, length, QUERIES):
        row = first_query + tl.arange(0, QUERIES)
        at = start + row[:, None] * HEAD_DIM + column[None, :]
        q = tl.load(query + at)
        row_max = tl.full((QUERIES,), float("-inf"), tl.float32)
        row_sum = tl.zeros((QUERIES,), tl.float32)
        normalised = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
        last_key = first_query + QUERIES if CAUSAL else length
        for first_key in tl.range(0, last_key, KEYS, num_stages=STAGES):
            index = first_key + tl.arange(0, KEYS)
            at_key = start + index[:, None] * HEAD_DIM + column[None, :]
            scores = tl.dot(q, tl.trans(tl.load(key + at_key))) * scale
            if CAUSAL:
                scores = tl.where(row[:, None] >= index[None, :], scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            exponentials = tl.exp2(scores - new_max[:, None])
            old_sum = row_sum * tl.exp2(row_max - new_max)
            row_sum = old_sum + tl.sum(exponentials, 1)
            normalised *= (old_sum / row_sum)[:, None]
            probabilities = exponentials / row_sum[:, None]
            v = tl.load(value + at_key)
            normalised = tl.dot(probabilities.to(v.dtype), v, normalised)
            row_max = new_max
        tl.store(out + at, normalised.to(out.dtype.element_ty))


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    """Output of (B, H, S, D) inputs, all contiguous and alike; S a multiple of 128, D of 16."""
    batch, heads, length, head_dim = query.shape
    wide = head_dim > 128
    out = torch.empty_like(query)
    flash1_forward[(batch * heads,)](
        query, key, value, out, length, head_dim**-0.5 * LOG2_E,
        CAUSAL=causal, HEAD_DIM=head_dim, QUERIES=64 if wide else 128, KEYS=64, STAGES=2 if wide else 3,
        num_warps=4 if head_dim <= 64 else 8, enable_fp_fusion=True,
    )  # fmt: skip
    return out
