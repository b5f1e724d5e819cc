"""What is measured on a GPU: flashtile and its peers, each as a function of query, key and value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from benchmarks.peers import LeftOutError
from flashtile.bench.cases import DTYPES, Case
from flashtile.bench.runs import Attention, flashtile_attention, standard_attention

Builder = Callable[[Case, torch.device], Attention]
PAGE_SIZES = (16, 256)


def _flashtile(case: Case, device: torch.device) -> Attention:
    return flashtile_attention(case)


def _sdpa(backend: SDPBackend) -> Builder:
    """One of the kernels behind PyTorch's function, and no other."""

    def build(case: Case, device: torch.device) -> Attention:
        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    query, key, value, is_causal=case.causal, enable_gqa=case.groups > 1
                )

        return attention

    return build


def _flex(case: Case, device: torch.device) -> Attention:
    """FlexAttention, compiled for this case alone."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # it gives up on a function after so many compilations
    torch._functorch.config.donated_buffer = False  # the backward pass is timed again and again on one graph
    compiled = torch.compile(flex_attention, dynamic=False)
    blocks = None
    if case.causal:
        blocks = create_block_mask(
            lambda batch, head, query, key: query >= key,
            None, None, case.query_length, case.keys, device=str(device),
        )  # fmt: skip
    return lambda query, key, value: compiled(
        query, key, value, block_mask=blocks, enable_gqa=case.groups > 1
    )


def _standard(case: Case, device: torch.device) -> Attention:
    scores = case.batch * case.heads * case.query_length * case.keys * DTYPES[case.dtype].itemsize
    # The backward pass holds the probabilities, their gradient, that of the scores, and one more in between.
    needed = scores * (6 if case.direction == "backward" else 3)
    if needed > _free_bytes(device):
        raise LeftOutError(f"its scores need {needed / 2**30:.0f} GiB")
    return standard_attention(case, device)


def _free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + kept)


def _flash1(case: Case, device: torch.device) -> Attention:
    if case.direction == "backward":
        raise LeftOutError("its schedule is measured in the forward pass")
    from benchmarks import flash1

    return lambda query, key, value: flash1.attention(query, key, value, case.causal)


PEERS: dict[str, Builder] = {
    "flashtile": _flashtile,
    "flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "flex": _flex,
    "flash1": _flash1,
    "standard": _standard,
}


def _decode_flashtile(case: Case, device: torch.device) -> Attention:
    lengths = torch.full((case.batch,), case.keys, device=device)
    return lambda query, key, value: flashtile.attention_kvcache(query, key, value, cache_lengths=lengths)


def _decode_paged(page_size: int) -> Builder:
    """The cache in pages at random places."""

    def build(case: Case, device: torch.device) -> Attention:
        pages = case.batch * case.keys // page_size
        places = torch.randperm(pages, device=device)
        table = places.view(case.batch, -1).to(torch.int32)
        lengths = torch.full((case.batch,), case.keys, device=device)
        pools: dict[int, Tensor] = {}

        def paged(cache: Tensor) -> Tensor:
            """(B, H, S, D) as (pages, H, page_size, D); made once for each cache."""
            if cache.data_ptr() not in pools:
                rows = cache.unflatten(2, (-1, page_size)).transpose(1, 2).flatten(0, 1)
                pools[cache.data_ptr()] = torch.empty_like(rows).index_copy_(0, places, rows)
            return pools[cache.data_ptr()]

        return lambda query, key, value: flashtile.attention_kvcache(
            query, paged(key), paged(value), cache_lengths=lengths, block_table=table
        )

    return build


DECODERS: dict[str, Builder] = {
    "flashtile": _decode_flashtile,
    **{f"flashtile, pages of {size}": _decode_paged(size) for size in PAGE_SIZES},
    "flash": PEERS["flash"],
    "cudnn": PEERS["cudnn"],
    "standard": PEERS["standard"],
}
TITLES = {
    "flashtile": "flashtile",
    **{f"flashtile, pages of {size}": f"flashtile, pages of {size}" for size in PAGE_SIZES},
    "flash": "SDPA FLASH (FlashAttention-2)",
    "cudnn": "SDPA CUDNN",
    "efficient": "SDPA EFFICIENT",
    "flex": "FlexAttention",
    "flash1": "FlashAttention-1 schedule",
    "standard": "standard attention",
}
