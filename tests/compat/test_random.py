"""Any combination of options, in float64, against the definitions of the other tests."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.compat.standard import leaves_of, standard
from tests.compat.test_kvcache import SHARED, expected_of, tables
from tests.compat.test_varlen import sequences, starts

LENGTHS = (0, 1, 2, 9, 33, 70)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def sizes_and_options(draw: random.Random) -> tuple[int, int, int, int, dict[str, Any]]:
    """(batch, heads, kv_heads, head_dim, options)"""
    kv_heads = draw.choice((1, 2, 3))
    batch, heads, head_dim = (
        draw.choice((1, 2, 3)),
        kv_heads * draw.choice((1, 2, 4)),
        draw.choice((1, 3, 8, 17, 64)),
    )
    options = {
        "causal": True,
        "window_size": (draw.choice((-1, 0, 1, 5, 40, 100)), draw.choice((-1, 0, 1, 5, 40, 100))),
        "softcap": draw.choice((0.7, 5.0)),
        "softmax_scale": draw.choice((0.1, 0.9, -0.3)),
        "alibi_slopes": normal(heads).abs().detach().requires_grad_(),
        "learnable_sink": normal(heads),
    }
    return batch, heads, kv_heads, head_dim, {name: v for name, v in options.items() if draw.random() < 0.4}


@pytest.mark.parametrize("seed", range(40))
def test_dense(seed):
    draw = random.Random(seed)
    batch, heads, kv_heads, head_dim, options = sizes_and_options(draw)
    sq, sk = draw.choice(LENGTHS), draw.choice(LENGTHS)
    arguments = {"q": normal(batch, sq, heads, head_dim), **options}
    arguments |= {name: normal(batch, sk, kv_heads, head_dim) for name in "kv"}
    found = flash_attn_func(**arguments, return_attn_probs=True)
    expected = standard(**arguments)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)
    check_gradients(arguments, found[0], expected[0])


@pytest.mark.parametrize("seed", range(40))
def test_varlen(seed):
    draw = random.Random(seed)
    batch, heads, kv_heads, head_dim, options = sizes_and_options(draw)
    queries, keys = ([draw.choice(LENGTHS) for _ in range(batch)] for _ in range(2))
    arguments = {"q": normal(sum(queries), heads, head_dim), **options}
    arguments |= {name: normal(sum(keys), kv_heads, head_dim) for name in "kv"}
    arguments |= {"cu_seqlens_q": starts(queries), "cu_seqlens_k": starts(keys)}
    arguments |= {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
    out, lse, probabilities = flash_attn_varlen_func(**arguments, return_attn_probs=True)
    parts = []
    for b, (rows, _, own) in enumerate(sequences(arguments)):
        expected, expected_lse, expected_probabilities = standard(**own)
        parts.append(expected[0])
        close(lse[:, rows], expected_lse[0])
        close(probabilities[b, :, : queries[b], : keys[b]], expected_probabilities[0])
    close(out, torch.cat(parts))
    check_gradients(arguments, out, torch.cat(parts))


@pytest.mark.parametrize("seed", range(40))
def test_kvcache(seed):
    draw = random.Random(seed)
    batch, heads, kv_heads, head_dim, options = sizes_and_options(draw)
    new, places = draw.choice((0, 1, 3, 7)), 20
    lengths = [draw.randint(0, places - new) for _ in range(batch)]
    call = {name: normal(batch, places, kv_heads, head_dim) for name in ("k_cache", "v_cache")}
    call |= {name: options[name] for name in (*SHARED, "alibi_slopes") if name in options}
    call["q"] = normal(batch, draw.choice((1, 1, 2, 5, 20)), heads, head_dim)
    call = {name: v.detach() if isinstance(v, Tensor) else v for name, v in call.items()}
    call["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    if draw.random() < 0.7:
        call |= {name: normal(batch, new, kv_heads, head_dim).detach() for name in "kv"}
        if head_dim > 1 and draw.random() < 0.6:
            call |= {
                **tables(2 * draw.randint(1, head_dim // 2), 40),
                "rotary_interleaved": draw.random() < 0.5,
            }
    if draw.random() < 0.3:
        call["cache_leftpad"] = torch.tensor([draw.randint(0, length) for length in lengths])
    if draw.random() < 0.3:
        call["cache_batch_idx"] = torch.tensor(draw.sample(range(batch), batch))
    expected = expected_of(call)
    found = (*flash_attn_with_kvcache(**call, return_softmax_lse=True), call["k_cache"], call["v_cache"])
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)


def check_gradients(arguments: dict[str, Any], found: Tensor, expected: Tensor) -> None:
    leaves, grad_out = list(leaves_of(arguments).values()), torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, grad_out),
        torch.autograd.grad(expected, leaves, grad_out),
        strict=True,
    ):
        close(ours, theirs)
