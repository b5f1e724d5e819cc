"""Which ranks a call runs on: those that pass keys around a ring, and those that share the heads."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashtile.parallel.exchange import Group


class Grid(NamedTuple):
    """The two groups of this rank; None is a rank alone.

    The sequence is sharded over the ring, and each shard of the ring over the ranks that share its heads.
    """

    ring: Group | None = None
    heads: Group | None = None

    @property
    def groups(self) -> list[Group]:
        return [group for group in (self.heads, self.ring) if group is not None]


def size_of(group: Group | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def checked_group(group: object) -> Group:
    """``group``, or the default one for None."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "flashtile.parallel needs torch.distributed: call torch.distributed.init_process_group first "
            "(torchrun sets its environment)"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group must be a torch.distributed.ProcessGroup that this rank belongs to, or None for all "
            f"ranks, got {type(group).__name__}"
        )
    return group


def grid_of(group: Group | DeviceMesh | None) -> Grid:
    """The grid of a group (a ring), of a mesh with one dimension (a ring) or two (the ring, the heads)."""
    if not isinstance(group, DeviceMesh):
        return Grid(ring=checked_group(group))
    if group.ndim > 2:
        raise ValueError(f"a DeviceMesh must have one or two dimensions (ring, heads), got {group.ndim}")
    return Grid(group.get_group(0), group.get_group(1) if group.ndim == 2 else None)
