"""Ring attention: keys and values travel from rank to rank while each computes with those it has.

Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers, arXiv 2310.01889. In step t rank r works on
the keys of rank r - t. The forward pass merges the partial results by their LSE, in float32. The backward
pass sends the keys around again, and dK and dV with them: each rank's kernels recompute their share of P from
the LSE of the whole rows, so that the parts of a gradient simply add up.

Keys go only to ranks that need them: from the neighbour before if it needed them too, else from their owner;
dK and dV collect along such a run of neighbours, and its last rank sends them home.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashtile import torch_ops
from flashtile.merging import combine
from flashtile.parallel.exchange import Batch, Group
from flashtile.parallel.grid import rank_in, size_of
from flashtile.parallel.parts import Pair, Whole
from flashtile.problem import compute_dtype


class Routes:
    """Who sends whose keys to whom, and when: the same on every rank."""

    def __init__(self, whole: Whole, size: int) -> None:
        self.size = size
        self._needs = [[whole.needs(rank, source) for source in range(size)] for rank in range(size)]

    def source(self, rank: int, step: int) -> int:
        """Whose keys a rank works on in a step."""
        return (rank - step) % self.size

    def needs(self, rank: int, step: int) -> bool:
        return self._needs[rank][self.source(rank, step)]

    def from_neighbour(self, rank: int, step: int) -> bool:
        """Whether the rank before worked on the same keys in the step before, and they were not its own."""
        return step > 1 and self.needs((rank - 1) % self.size, step - 1)

    def carrier(self, rank: int, step: int) -> int | None:
        """The rank that sends the keys of this step to ``rank``."""
        if not self.needs(rank, step):
            return None
        return (rank - 1) % self.size if self.from_neighbour(rank, step) else self.source(rank, step)

    def heir(self, rank: int, step: int) -> int | None:
        """The rank that gets dK and dV after this step of ``rank``: the next to add, or their owner."""
        if not self.needs(rank, step):
            return None
        after = (rank + 1) % self.size
        return after if step + 1 < self.size and self.needs(after, step + 1) else self.source(rank, step)


class _Ring:
    """One pass around the ring, as one rank sees it; on a ring of one, keys stay where they are."""

    def __init__(
        self, operation: str, group: Group | None, whole: Whole, query: Tensor, key: Tensor, value: Tensor
    ) -> None:
        self.whole, self.query, self.key, self.value = whole, query, key, value
        self.rank, self.size = rank_in(group), size_of(group)
        self.routes = Routes(whole, self.size)
        self._operation, self._group = operation, group
        self._own: Tensor | None = None

    def pairs(self, step: int) -> Iterator[Pair]:
        return self.whole.pairs(self.rank, self.routes.source(self.rank, step))

    def memory(self, source: int, dtype: torch.dtype) -> Tensor:
        """Room for the keys and values of a rank (or their gradients), in one piece that can be sent."""
        return self.query.new_empty(sum(shape.numel() for shape in self._shapes(source)), dtype=dtype)

    def views(self, memory: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """The keys and the values in it."""
        shapes = self._shapes(source)
        key, value = memory.split_with_sizes([shape.numel() for shape in shapes])
        return key.view(shapes[0]), value.view(shapes[1])

    def _shapes(self, source: int) -> list[torch.Size]:
        length = sum(chunk.length for chunk in self.whole.keys[source])
        return [torch.Size((*t.shape[:2], length, t.shape[3])) for t in (self.key, self.value)]

    def keys(self, step: int, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """The keys and values of a step, from what ``fetch`` has brought."""
        if memory is None:
            return self.key, self.value
        return self.views(memory, self.routes.source(self.rank, step))

    def fetch(self, step: int, current: Tensor | None) -> tuple[Batch, Tensor | None]:
        """Starts what brings the keys of ``step``; ``current`` holds those of the step before."""
        batch, incoming = self._batch(step, "keys and values"), None
        if step == self.size:
            return batch, incoming
        for rank in range(self.size):
            if self.routes.carrier(rank, step) == self.rank:
                carried = current if self.routes.from_neighbour(rank, step) else self._own_keys()
                assert carried is not None  # who carries keys on has worked on them
                batch.send(carried, rank)
        carrier = self.routes.carrier(self.rank, step)
        if carrier is not None:
            incoming = self.memory(self.routes.source(self.rank, step), self.query.dtype)
            batch.receive(incoming, carrier)
        batch.start()
        return batch, incoming

    def _own_keys(self) -> Tensor:
        if self._own is None:
            self._own = torch.cat([self.key.reshape(-1), self.value.reshape(-1)])
        return self._own

    def hand_on(self, step: int, collected: Tensor) -> tuple[Batch, Tensor | None, Tensor | None]:
        """Starts what sends dK and dV on after ``step``; also what arrives for the next, and comes home."""
        batch, arriving, home = self._batch(step, "gradients of keys and values"), None, None
        for rank in range(self.size):
            heir, source = self.routes.heir(rank, step), self.routes.source(rank, step)
            if heir is not None and rank == self.rank:
                batch.send(collected, heir)
            elif heir == self.rank:
                memory = self.memory(source, collected.dtype)
                batch.receive(memory, rank)
                if source == self.rank:
                    home = memory
                else:
                    arriving = memory
        batch.start()
        return batch, arriving, home

    def _batch(self, step: int, what: str) -> Batch:
        return Batch(self._group, f"{self._operation}: step {step} of {self.size - 1}, {what}")


def _forward(ring: _Ring, slopes: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output and the LSE of this rank's queries, merged in the order of the steps."""
    query, dtype = ring.query, compute_dtype(ring.query.dtype)
    out = query.new_zeros(*query.shape[:3], ring.value.shape[3], dtype=dtype)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
    if sinks is not None:  # a part without keys: all of its denominator is the sink
        lse.copy_(sinks[:, None])
    current: Tensor | None = None
    for step in range(ring.size):
        batch, incoming = ring.fetch(step + 1, current)
        key, value = ring.keys(step, current)
        for pair in ring.pairs(step):
            part_out, part_lse = torch_ops.forward(ring.whole.problem(pair, query, key, value, slopes))
            so_far, rows = out[:, :, pair.rows], lse[:, :, pair.rows]
            merged = combine([so_far, part_out.to(dtype)], [rows, part_lse])
            so_far.copy_(merged[0])
            rows.copy_(merged[1])
        batch.wait()
        current = incoming
    return out.to(query.dtype), lse


class _Upstream(NamedTuple):
    """What the backward pass is given, of whole rows."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    def rows(self, span: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        out, lse, grad_out = (tensor[:, :, span] for tensor in self[:3])
        return out, lse, grad_out, None if self.grad_lse is None else self.grad_lse[:, :, span]


def _backward(ring: _Ring, slopes: Tensor | None, upstream: _Upstream) -> tuple[Tensor | None, ...]:
    """dQ, dK, dV and the gradient of the slopes, each added up in a fixed order."""
    dtype = compute_dtype(ring.query.dtype)
    grad_query = torch.zeros_like(ring.query, dtype=dtype)
    grad_slopes = None if slopes is None else torch.zeros_like(slopes)
    own = ring.memory(ring.rank, dtype).zero_()
    current: Tensor | None = None
    handing: tuple[Batch, Tensor | None, Tensor | None] | None = None
    for step in range(ring.size):
        batch, incoming = ring.fetch(step + 1, current)
        source = ring.routes.source(ring.rank, step)
        collected = own if step == 0 else ring.memory(source, dtype).zero_()
        key, value = ring.keys(step, current)
        grad_key, grad_value = ring.views(collected, source)
        for pair in ring.pairs(step):
            problem = ring.whole.problem(pair, ring.query, key, value, slopes)
            wanted = (True, True, True, False, slopes is not None, False)
            found = torch_ops.backward(problem, *upstream.rows(pair.rows), wanted)
            grad_query[:, :, pair.rows] += found.query
            grad_key[:, :, pair.key_rows] += found.key
            grad_value[:, :, pair.key_rows] += found.value
            if grad_slopes is not None and found.alibi_slopes is not None:
                grad_slopes += found.alibi_slopes
        if handing is not None:
            _add_handed_on(handing, collected, own)
        if step > 0:
            handing = ring.hand_on(step, collected)
        batch.wait()
        current = incoming
    if handing is not None:
        _add_handed_on(handing, None, own)
    narrow = ring.query.dtype
    grad_key, grad_value = ring.views(own, ring.rank)
    return grad_query.to(narrow), grad_key.to(narrow), grad_value.to(narrow), grad_slopes


def _add_handed_on(
    handing: tuple[Batch, Tensor | None, Tensor | None], collected: Tensor | None, own: Tensor
) -> None:
    batch, arriving, home = handing
    batch.wait()
    if arriving is not None and collected is not None:
        collected += arriving
    if home is not None:
        own += home


def _sink_gradient(ring: _Ring, sinks: Tensor, upstream: _Upstream) -> Tensor | None:
    """The gradient of the sinks, from a part without keys: P of a sink is exp(sink - LSE), its value 0."""
    out, lse, grad_out, grad_lse = upstream
    delta = (grad_out.to(lse.dtype) * out).sum(-1)
    # That part has no output, so that kernels would take -dLSE for delta.
    grad_lse = -delta if grad_lse is None else grad_lse - delta
    problem = ring.whole.without_keys(ring.query, ring.key, ring.value, sinks)
    wanted = (False, False, False, False, False, True)
    return torch_ops.backward(problem, out, lse, grad_out, grad_lse, wanted).sinks


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operation: str,
        group: Group | None,
        whole: Whole,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(_Ring(operation, group, whole, query, key, value), slopes, sinks)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, slopes, sinks, out, lse)
        ctx.call = operation, group, whole
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, slopes, sinks, out, lse = ctx.saved_tensors
        operation, group, whole = ctx.call
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        upstream = _Upstream(out, lse, grad_out, grad_lse)
        ring = _Ring(f"{operation}, backward", group, whole, query, key, value)
        grad_sinks = None if sinks is None else _sink_gradient(ring, sinks, upstream)
        return None, None, None, *_backward(ring, slopes, upstream), grad_sinks


def around_the_ring(
    operation: str,
    group: Group | None,
    whole: Whole,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of this rank's queries; ``group`` is None for a rank that has all keys itself."""
    return _RingAttention.apply(operation, group, whole, query, key, value, slopes, sinks)  # type: ignore[no-any-return, no-untyped-call]
