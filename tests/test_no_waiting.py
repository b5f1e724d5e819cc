"""Nothing in the call path reads values back from a device: CUDA graphs can hold every call.

The tensors here are on the device "meta" and have no values: reading one is an error, and whatever looks at
values only in host memory must do without them, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import masks, rotary
from flashtile.compat import flash_attn


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 4, 9, 8), normal(2, 2, 9, 8), normal(2, 2, 9, 8)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"mask": masks.causal()},
    "window": lambda: {"mask": masks.window(3, 0)},
    "key lengths": lambda: {"mask": masks.key_lengths(integers(2))},
    "key starts and causal": lambda: {"mask": masks.key_starts(integers(2)) & masks.causal()},
    "key range": lambda: {"mask": masks.key_range(integers(2, 9), integers(2, 9))},
    "documents": lambda: {"mask": masks.documents(integers(2, 9))},
    "prefix": lambda: {"mask": masks.prefix(integers(2))},
    "chunks": lambda: {"mask": masks.chunks(4) & masks.causal()},
    "dense": lambda: {"mask": integers(2, 1, 9, 9) > 0},
    "dense and causal": lambda: {"mask": masks.causal() & (integers(9, 9) > 0)},
    "bias": lambda: {"bias": normal(1, 4, 9, 9)},
    "ALiBi, sinks, softcap": lambda: {
        "alibi_slopes": normal(4, dtype=torch.float32),
        "sinks": normal(4, dtype=torch.float32),
        "softcap": 3.0,
    },
    "dropout": lambda: {"dropout_p": 0.1},
    "dropout, a seed": lambda: {"dropout_p": 0.1, "seed": 2**64 - 1},
    "dropout, a seed on the device": lambda: {"dropout_p": 0.1, "seed": integers(1).long()},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention(name: str):
    query, key, value = qkv()
    out, lse = flashtile.attention(query, key, value, **OPTIONS[name](), return_lse=True)
    (out.sum() + lse.sum()).backward()
    assert query.grad is not None


@pytest.mark.parametrize(
    "mask",
    [
        lambda: None,
        lambda: masks.causal(),
        lambda: masks.window(3, 1, alignment="bottom-right"),
        lambda: masks.key_lengths(integers(3)) & masks.causal(),
        lambda: masks.documents(integers(20)) & masks.chunks(4),
    ],
)
def test_packed_sequences(mask: Callable[[], Any]):
    query, key, value = normal(20, 4, 8), normal(20, 2, 8), normal(20, 2, 8)
    out = flashtile.attention_varlen(query, key, value, integers(4), mask=mask(), max_seqlen_q=9)
    out.sum().backward()
    assert query.grad is not None
    options = {"alibi_slopes": normal(4, dtype=torch.float32), "dropout_p": 0.1, "return_lse": True}
    aligned = masks.causal(alignment="bottom-right")
    flashtile.attention_varlen(query, key, value, integers(4), integers(4), mask=aligned, **options)


@torch.no_grad()
def test_caches():
    query, new = normal(2, 4, 1, 8), normal(2, 2, 1, 8)
    angles = normal(64, 4, dtype=torch.float32)
    options = {"cache_lengths": integers(2), "rotary_cos": angles, "rotary_sin": angles, "return_lse": True}
    cache, pages = normal(2, 2, 64, 8), normal(9, 2, 16, 8)
    for place in ({}, {"batch_index": integers(2)}):
        out, lse = flashtile.attention_kvcache(
            query, cache, torch.empty_like(cache), key=new, value=new, mask=masks.window(9, 0),
            left_padding=integers(2), **options, **place,
        )  # fmt: skip
        assert out.device.type == lse.device.type == "meta"
    flashtile.attention_kvcache(
        query, pages, torch.empty_like(pages), key=new, value=new, block_table=integers(2, 4), **options
    )
    flashtile.attention_kvcache(query, cache, cache, cache_lengths=7)
    paged = flashtile.attention_varlen(
        normal(5, 4, 8), normal(9, 16, 2, 8), normal(9, 16, 2, 8), integers(3), integers(3),
        block_table=integers(2, 4), mask=masks.causal(alignment="bottom-right"),
    )  # fmt: skip
    assert paged.device.type == "meta"


@torch.no_grad()
def test_merging_and_rotating():
    parts = [flashtile.attention(*qkv(), return_lse=True) for _ in range(2)]
    flashtile.merge(*zip(*parts, strict=True))
    angles = normal(64, 4, dtype=torch.float32)
    rotary.apply(qkv()[0], angles, angles, integers(2, 9))


def test_flash_attns_functions():
    query, key, value = (tensor.transpose(1, 2) for tensor in qkv())
    flash_attn.flash_attn_func(query, key, value, dropout_p=0.1, causal=True)
    packed = (normal(20, 4, 8), normal(20, 2, 8), normal(20, 2, 8), integers(4), integers(4), 9, 9)
    flash_attn.flash_attn_varlen_func(*packed, causal=True, window_size=(3, 0))


def test_reading_a_value_would_show():
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        int(integers(1)[0])
