"""The rare path: NaN or infinity in the inputs, multiplied number by number.

A product of whole tiles multiplies a hidden row's NaN by the probability 0 and poisons every result. So a
program whose result is not finite computes it again here, from the visible entries alone.
"""

import triton
import triton.language as tl


@triton.jit
def has_only_finite(tile: "tl.tensor"):
    """Whether no number of a tile is NaN or infinite."""
    return tl.min(tl.min((tl.abs(tile) < float("inf")).to(tl.int32), 1), 0) == 1


@triton.jit
def exact_product(
    weights: "tl.tensor",
    seen: "tl.tensor",
    addresses: "tl.tensor",
    step: "tl.tensor",
    existing: "tl.tensor",
    accumulated: "tl.tensor",
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``accumulated + weights @ rows`` over entries that are ``seen``.

    weights, seen: (M, N); addresses, existing: (N,), where the rows begin; accumulated: (M, WIDTH).
    """
    number, column = tl.arange(0, weights.shape[1]), tl.arange(0, WIDTH)
    for n in range(weights.shape[1]):
        chosen = number == n
        weight = tl.sum(tl.where(chosen[None, :], weights, 0.0), 1)
        counts = tl.max((chosen[None, :] & seen).to(tl.int32), 1) > 0
        address = tl.sum(tl.where(chosen, addresses.to(tl.int64), 0), 0).to(addresses.dtype)
        columns = tl.where(tl.max((chosen & existing).to(tl.int32), 0) > 0, COLUMNS, 0)
        row = tl.load(address + column.to(tl.int64) * step, mask=column < columns, other=0.0).to(tl.float32)
        accumulated += tl.where(counts[:, None], weight[:, None] * row[None, :], 0.0)
    return accumulated
