"""``context_parallel``: models attend over all ranks, each of which holds its part of the sequence."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from flashtile.integrations import active
from flashtile.parallel.agreement import agree_everywhere
from flashtile.parallel.call import Options, attend
from flashtile.parallel.exchange import Group, named
from flashtile.parallel.grid import Grid, grid_of
from flashtile.parallel.layouts import Layout, checked_documents, checked_layout, positions_of
from flashtile.parallel.sharding import cut, join, runs_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Method = Literal["ring", "ulysses", "allgather", "mesh"]
Batch = dict[str, Any]
NO_LABEL = -100  # what cross_entropy, and Transformers, ignore


class _Nothing(NamedTuple):
    """There is nothing to compare but whether a rank refuses."""


@dataclass(eq=False)
class ContextParallel:
    """How a sequence lies on the ranks and how they attend; ``context_parallel`` makes and enters it."""

    method: Method
    layout: Layout
    cu_seqlens: tuple[int, ...] | None
    grid: Grid
    calls: int = field(default=0, init=False)

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor that is whole on every rank (see ``flashtile.parallel.shard``)."""
        return cut(tensor, self.grid, dim, self.layout, self.cu_seqlens)

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The whole of the parts (see ``flashtile.parallel.unshard``)."""
        return join(tensor, self.grid, dim, self.layout, self.cu_seqlens)

    def positions(self, length: int) -> Tensor:
        """int64 (own length,): the position ids of this rank's part of ``length`` tokens.

        They count in the whole sequence, or with ``cu_seqlens`` in each document.
        """
        ring, (own,) = runs_of(self.grid, length, self.layout, self.cu_seqlens)
        return positions_of(ring, self.cu_seqlens)[own.span]

    def shard_batch(
        self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Batch:
        """What a causal language model of Transformers takes on this rank: ``model(**batch).loss``.

        Labels are moved by one token before they are cut, since the next token of a part's last one lies on
        another rank. The loss that the model returns is this rank's share of the mean over all labels: the
        shares add up to it (``total``), and so do their gradients. Where a wrapper averages gradients over
        the ranks (DistributedDataParallel, FSDP), multiply the loss by their number first. Without
        Transformers the same loss is ``cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(),
        reduction="sum") / batch["num_items_in_batch"]``.

        Args:
            input_ids: (B, S), whole, the same on every rank.
            labels: (B, S), not moved yet; -100 where there is none. Of packed documents the first token of
                each should have none, else the document before is asked to predict it.
            attention_mask: (B, S), 0 or False at padding.

        Returns:
            ``input_ids`` and ``position_ids`` (B, own length), ``use_cache=False``; ``attention_mask`` if
            there is one; with labels ``labels`` and ``shift_labels``, both the moved ones, and the number of
            all labels, ``num_items_in_batch``. A model that does not hand ``shift_labels`` to its loss moves
            the labels twice; losses of other kinds (of a router) are those of the rank.

        Raises:
            ValueError: shapes that are not those of ``input_ids``.
        """
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be (batch, length), got shape {tuple(input_ids.shape)}")
        for name, tensor in (("labels", labels), ("attention_mask", attention_mask)):
            if tensor is not None and tensor.shape != input_ids.shape:
                raise ValueError(
                    f"{name} must have the shape of input_ids, {tuple(input_ids.shape)}, "
                    f"got {tuple(tensor.shape)}"
                )
        positions = self.positions(input_ids.shape[1]).to(input_ids.device)
        batch: Batch = {
            "input_ids": self.shard(input_ids),
            "position_ids": positions.expand(input_ids.shape[0], -1),
            "use_cache": False,
        }
        if attention_mask is not None:
            batch["attention_mask"] = self.shard(attention_mask)
        if labels is not None:
            moved = F.pad(labels[:, 1:], (0, 1), value=NO_LABEL)
            own = self.shard(moved).contiguous()
            batch |= {"labels": own, "shift_labels": own, "num_items_in_batch": (moved != NO_LABEL).sum()}
        return batch

    def total(self, share: Tensor) -> Tensor:
        """The sum over all ranks, without gradients: of the shares of a loss, the loss."""
        share = share.detach().clone()
        for group in self.grid.groups:
            with named("context_parallel: adding up"):
                dist.all_reduce(share, group=group)
        return share

    def agree(self, refusal: Exception | None, near: Tensor) -> None:
        """Raises ``refusal``, or where another rank has one an error that names it: on every rank.

        ``near``: a tensor on this rank's device.
        """
        agree_everywhere("context_parallel", self.grid.groups, _Nothing(), refusal, near=near)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        refusal: Exception | None = None,
        **options: Unpack[Options],
    ) -> Tensor:
        """The output (B, Hq, own length, Dv) of this rank's queries; ``refusal`` as in ``agree``."""
        self.calls += 1
        out: Tensor = attend(
            f"context_parallel ({self.method})", self.grid, self.layout, query, key, value, options,
            gathering=self.method == "allgather", cu_seqlens=self.cu_seqlens, refusal=refusal,
        )[0]  # fmt: skip
        return out


@contextlib.contextmanager
def context_parallel(
    group: Group | DeviceMesh | None = None,
    *,
    method: Method = "ring",
    layout: Layout = "contiguous",
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Iterator[ContextParallel]:
    """Inside the block attention takes each rank's tensors for its part of one long sequence.

    That is the attention of Transformers models with ``attn_implementation="flashtile"``, and torch's
    ``scaled_dot_product_attention`` behind ``flashtile.activated()``. Everything else of a model works on
    single tokens and needs no change; position ids have to be those of the whole sequence::

        with context_parallel(layout="zigzag") as context:
            batch = context.shard_batch(input_ids, labels)  # whole on every rank
            loss = model(**batch).loss
            loss.backward()
        print(context.total(loss))

    Blocks nest, and hold for all threads of the process. A backward pass that computes attention again
    (checkpoints) belongs inside.

    Args:
        group: the ranks, by default all; for ``"mesh"`` a DeviceMesh of one or two dimensions.
        method: ``"ring"``, ``"ulysses"``, ``"allgather"`` or ``"mesh"``: which ``..._attention`` of
            ``flashtile.parallel`` attends.
        layout: how the sequence lies on the ranks (see ``shard``); ``"zigzag"`` balances causal work. For
            ``"ulysses"``, whose work is balanced anyway, ``"contiguous"``.
        cu_seqlens: where packed documents begin, and their length (see ``ring_attention``): they are cut one
            by one (for ``"ulysses"`` all together), and see only themselves.

    What cannot be computed so is refused with the reason, on every rank: caches of keys and values
    (generation), cross-attention, masks that are matrices, biases, chunked attention with padding on the left
    or packed documents, position ids that are not those of this rank's part.

    Raises:
        TypeError, ValueError: a group, a method or a layout that does not fit.

    Warns:
        UserWarning: nothing in the block has attended through flashtile.
    """
    context = _made(group, method, layout, cu_seqlens)
    with active.entered(context):
        yield context
    if not context.calls:
        warnings.warn(
            "nothing in this context_parallel block attended through flashtile: a Transformers model does "
            'with attn_implementation="flashtile", torch\'s scaled_dot_product_attention inside '
            "flashtile.activated()",
            stacklevel=3,
        )


def _made(
    group: Group | DeviceMesh | None,
    method: Method,
    layout: Layout,
    cu_seqlens: Tensor | Sequence[int] | None,
) -> ContextParallel:
    if method not in get_args(Method):
        names = ", ".join(f'"{name}"' for name in get_args(Method))
        raise ValueError(f"method must be one of {names}, got {method!r}")
    checked_layout(layout)
    if method == "mesh" and not isinstance(group, DeviceMesh):
        raise TypeError(f'group must be a DeviceMesh with method="mesh", got {type(group).__name__}')
    grid = grid_of(group)
    if method != "mesh" and grid.heads is not None:
        raise ValueError(f'a DeviceMesh of two dimensions needs method="mesh", got {method!r}')
    if method == "ulysses":
        if layout != "contiguous":
            raise ValueError(f'layout must be "contiguous" with method="ulysses", got {layout!r}')
        grid = Grid(heads=grid.ring)
    return ContextParallel(method, layout, checked_documents(cu_seqlens), grid)
