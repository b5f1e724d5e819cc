"""Attention over a sequence that lies on several ranks of torch.distributed: gloo on CPUs, NCCL on GPUs."""

from flashtile.parallel.attention import (
    allgather_attention,
    mesh_attention,
    ring_attention,
    ulysses_attention,
)
from flashtile.parallel.context import ContextParallel, context_parallel
from flashtile.parallel.sharding import shard, unshard

__all__ = [
    "ContextParallel",
    "allgather_attention",
    "context_parallel",
    "mesh_attention",
    "ring_attention",
    "shard",
    "ulysses_attention",
    "unshard",
]
