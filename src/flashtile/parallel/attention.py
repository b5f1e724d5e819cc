"""The front doors: ring, Ulysses, all-gather, and ring and Ulysses together on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.parallel.call import Options, attend
from flashtile.parallel.exchange import Group
from flashtile.parallel.grid import Grid, checked_group, grid_of
from flashtile.parallel.layouts import Layout

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group | None = ...,
    layout: Layout = ...,
    cu_seqlens: Tensor | Sequence[int] | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group | None = ...,
    layout: Layout = ...,
    cu_seqlens: Tensor | Sequence[int] | None = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group | None = None,
    layout: Layout = "contiguous",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence that lies on several ranks: keys travel from rank to rank.

    Every rank holds the same part of query, key and value: a run of positions, or two (see ``shard``). Memory
    per rank is that of its own part and of one other rank's keys and values; while a rank computes, the next
    keys arrive. Ranks that see none of the keys (causal, windows, documents) are not sent them. The results
    are those of ``flashtile.attention`` on the whole sequence but for rounding, with the same bits in every
    run.

    Differentiable in query, key, value, alibi_slopes and sinks, through the output and the LSE: gradients of
    the sum of all ranks' losses. Those of alibi_slopes and sinks are, as those of any weight are, what this
    rank's queries contribute: add them up over the group. Every rank has to run backward, or none. There is
    no second derivative.

    Args:
        query: (B, Hq, own queries, D), the dtypes of ``flashtile.attention``.
        key: (B, Hkv, own keys, D).
        value: (B, Hkv, own keys, Dv).
        group: the ranks, by default all. Their order is that of the sequence.
        layout: how the sequence lies on them. Contiguous parts may have any lengths, 0 too; zigzag ones those
            that ``shard`` gives.
        cu_seqlens: (documents + 1,) where packed documents begin, and the length of all at the end. The parts
            are those that ``shard`` gives with the same ``cu_seqlens``: each document is cut for itself. A
            query sees keys of its own document only; positions of ``mask`` and ``alibi_slopes`` count in the
            whole, where those of a document are consecutive, so that causal, windows and distances are those
            within it. Each document is computed for itself: many short ones take long.
        return_lse: also return the LSE.
        options: see ``Options``.

    Returns:
        The output (B, Hq, own queries, Dv) in query's dtype; with ``return_lse`` also the LSE (B, Hq, own
        queries) in float32 (float64 for float64 inputs).

    A row whose LSE exceeds 2**13 in magnitude has gradients as exact as its LSE, which is rounded to float32.

    Raises:
        TypeError, ValueError: as ``flashtile.attention``, for an option that is not supported, and where the
            ranks' arguments do not fit together. Every rank raises, before anything is exchanged.
        NotImplementedError: no backend serves the device.
        RuntimeError: a rank failed or did not answer within the group's timeout; says in which step.
    """
    grid = Grid(ring=checked_group(group))
    out, lse = attend("ring_attention", grid, layout, query, key, value, options, cu_seqlens=cu_seqlens)
    return (out, lse) if return_lse else out


@overload
def allgather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group | None = ...,
    layout: Layout = ...,
    cu_seqlens: Tensor | Sequence[int] | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def allgather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group | None = ...,
    layout: Layout = ...,
    cu_seqlens: Tensor | Sequence[int] | None = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
def allgather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group | None = None,
    layout: Layout = "contiguous",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """``ring_attention`` in its simplest form: every rank gathers all keys and values, then computes.

    Memory per rank is that of the keys and values of the whole sequence, and nothing is computed meanwhile;
    but a rank computes in one go, which suits grouped heads (few keys) and short sequences. Arguments,
    results and errors are those of ``ring_attention``.
    """
    grid = Grid(ring=checked_group(group))
    out, lse = attend(
        "allgather_attention", grid, layout, query, key, value, options, gathering=True, cu_seqlens=cu_seqlens
    )
    return (out, lse) if return_lse else out


@overload
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group | None = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence that lies on several ranks: each attends with some of the heads.

    An all-to-all hands every rank the whole sequence for its share of the heads, and another one brings the
    output back. Key heads go whole to a rank where there is one for each rank; else ranks share a key head,
    which is copied to each, and its gradients are added up. More ranks than query heads leave some idle. The
    work of packed documents is balanced anyway: they go as ``mask=masks.documents(ids)``.
    Arguments, results and errors are those of ``ring_attention``; parts are contiguous, of any lengths.
    """
    grid = Grid(heads=checked_group(group))
    out, lse = attend("ulysses_attention", grid, "contiguous", query, key, value, options)
    return (out, lse) if return_lse else out


@overload
def mesh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh,
    layout: Layout = ...,
    cu_seqlens: Tensor | Sequence[int] | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def mesh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh,
    layout: Layout = ...,
    cu_seqlens: Tensor | Sequence[int] | None = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
def mesh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh,
    layout: Layout = "contiguous",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Ring and Ulysses together: keys travel along one dimension of a mesh, heads are shared along the other.

    The first dimension is the ring, the second shares the heads. The sequence is cut for the ring, in this
    layout, and each of these parts into contiguous ones for the ranks that share its heads: ``shard(tensor,
    mesh, dim, layout)``. On a machine with several devices the second dimension belongs inside, where
    all-to-all is cheap. Arguments, results and errors are those of ``ring_attention``; a mesh of one
    dimension is a ring.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed DeviceMesh, got {type(mesh).__name__}")
    out, lse = attend(
        "mesh_attention", grid_of(mesh), layout, query, key, value, options, cu_seqlens=cu_seqlens
    )
    return (out, lse) if return_lse else out
