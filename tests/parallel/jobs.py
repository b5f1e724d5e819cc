"""What the tests let every rank do. A case says all there is to know: each rank makes the same inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import flashtile
from benchmarks import parallel as parallel_benchmark
from flashtile import masks, parallel, torch_ops
from flashtile.masks import Mask
from flashtile.parallel import exchange
from flashtile.parallel.layouts import even_layout
from flashtile.problem import AttentionProblem
from tests.oracle import random_gradients, random_problem

SLEEP_S = 8.0
meshes: dict[tuple[int, int], DeviceMesh] = {}  # made by all processes at their start, as groups are


@dataclass(frozen=True)
class Case:
    """One call on several ranks. ``shards``: the lengths of all queries and of all keys, where uneven."""

    ranks: int
    way: str = "ring"
    layout: str = "contiguous"
    mask: Mask | Tensor | None = None
    shards: tuple[list[int], list[int]] | None = None
    mesh: tuple[int, int] | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    documents: tuple[int, ...] | None = None  # cumulative lengths: each is cut for itself
    poisoned: str | None = None  # the input that holds a NaN

    def problem(self) -> tuple[AttentionProblem, Tensor, Tensor]:
        """The whole problem, grad_out and grad_lse."""
        generator = torch.Generator().manual_seed(5)
        lengths = {"query_length": 61, "key_length": 61}
        if self.shards is not None:
            lengths = dict(zip(lengths, map(sum, self.shards), strict=True))
        mask = self.mask
        if self.documents is not None:
            lengths = dict.fromkeys(lengths, self.documents[-1])
            ids = torch.tensor(self.documents).diff()
            apart = masks.documents(torch.arange(len(ids)).repeat_interleave(ids))
            mask = apart if mask is None else apart & mask
        problem = random_problem(**(lengths | self.sizes), mask=mask, generator=generator)
        if self.poisoned is not None:
            getattr(problem, self.poisoned)[0, 1, 29, 2] = torch.nan
        return problem, *random_gradients(problem, generator)

    def rows(self, rank: int, length: int, keys: bool = False) -> Tensor:
        """The positions of a rank's shard, found without the package."""
        whole = torch.arange(length)
        if self.shards is not None:
            return whole.split(self.shards[int(keys)])[rank]
        ring, heads = (self.ranks, 1) if self.mesh is None else self.mesh
        place, inner = divmod(rank, heads)
        if self.documents is not None:  # test_routes.py says that these are right
            chunks = even_layout(length, ring, self.layout, self.documents)[place]
            own = torch.cat([whole[chunk.span] for chunk in chunks])
            return own.tensor_split(heads)[inner]
        if self.layout == "contiguous":
            own = whole.tensor_split(ring)[place]
        else:
            chunks = whole.tensor_split(2 * ring)
            own = torch.cat([chunks[place], chunks[2 * ring - 1 - place]])
        return own.tensor_split(heads)[inner]


def call(case: Case, group: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    if case.way == "mesh":
        assert case.mesh is not None
        options["mesh"] = meshes[case.mesh]
    else:
        options["group"] = group
    if case.way != "ulysses":
        options.setdefault("layout", case.layout)
        options.setdefault("cu_seqlens", case.documents)
    return getattr(parallel, f"{case.way}_attention")(query, key, value, **options)


def options_of(case: Case, problem: AttentionProblem) -> dict[str, Any]:
    names = ("softcap", "alibi_slopes", "sinks", "dropout_p", "seed", "scale")
    found = {name: getattr(problem, name) for name in names}
    return {name: option for name, option in found.items() if option is not None} | {"mask": case.mask}


def attend(group: Any, case: Case) -> dict[str, Tensor]:
    """This rank's part of the results and of the gradients."""
    problem, grad_out, grad_lse = case.problem()
    rank = dist.get_rank(group)
    rows = case.rows(rank, problem.query.shape[2])
    key_rows = case.rows(rank, problem.key.shape[2], keys=True)
    leaves = {"query": problem.query[:, :, rows], "key": problem.key[:, :, key_rows]}
    leaves["value"] = problem.value[:, :, key_rows]
    leaves |= {n: t for n in ("alibi_slopes", "sinks") if (t := getattr(problem, n)) is not None}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in leaves.items()}
    problem = dataclasses.replace(problem, **leaves)
    out, lse = call(
        case, group, problem.query, problem.key, problem.value, return_lse=True, **options_of(case, problem)
    )
    gradients = torch.autograd.grad(
        (out, lse), list(leaves.values()), (grad_out[:, :, rows], grad_lse[:, :, rows])
    )
    return {"out": out.detach(), "lse": lse.detach()} | {
        f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)
    }


def attend_twice(group: Any, case: Case) -> bool:
    """Whether the same bits come out again."""
    first, second = attend(group, case), attend(group, case)
    return all(torch.equal(first[name], second[name]) for name in first)


def say(group: Any, way: str, changes: list[dict[str, Any]], options: list[dict[str, Any]]) -> str:
    """Calls with the sizes and the options of this rank; returns the error that it raises."""
    rank = dist.get_rank(group)
    sizes = {"heads": 4, "kv_heads": 2, "query_length": 6, "key_length": 6, "head_dim": 8} | changes[rank]
    problem = random_problem(**sizes)
    case = Case(len(changes), way)
    try:
        call(case, group, problem.query, problem.key, problem.value, **options[rank])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def numbers_sent(group: Any, case: Case) -> list[int]:
    """How many numbers this rank sends to each other one, forward and backward."""
    sent = [0] * case.ranks
    original = dist.batch_isend_irecv

    def counting(messages: list[dist.P2POp]) -> list[dist.Work]:
        for message in messages:
            if message.op is dist.isend:
                sent[message.peer] += message.tensor.numel()
        return original(messages)

    dist.batch_isend_irecv = counting
    try:
        attend(group, case)
    finally:
        dist.batch_isend_irecv = original
    return sent


def bytes_sent(group: Any, case: Case, overlapping: bool = True) -> list[int]:
    """Forward and backward."""
    problem, _, _ = case.problem()
    rows = case.rows(dist.get_rank(group), problem.query.shape[2])
    leaves = [x[:, :, rows].requires_grad_() for x in (problem.query, problem.key, problem.value)]
    with contextlib.nullcontext() if overlapping else exchange.without_overlap():
        with exchange.counted() as forward:
            out = call(case, group, *leaves, mask=case.mask)
        with exchange.counted() as backward:
            out.sum().backward()
    return [forward.bytes, backward.bytes]


def benchmark(group: Any, wrong: bool = False, **arguments: Any) -> Any:
    """``python -m benchmarks.parallel`` without its processes; ``wrong``: the ring adds something."""
    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            attend = parallel.ring_attention
            patch.setattr(
                parallel, "ring_attention", lambda *inputs, **options: attend(*inputs, **options) + 0.1
            )
        return parallel_benchmark.measure_all(dist.get_rank(group), **arguments)


def shard_and_unshard(group: Any, shape: tuple[int, ...], dim: int, layout: str, dtype: torch.dtype) -> bool:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    own = parallel.shard(whole, group, dim, layout)
    rows = Case(dist.get_world_size(group), layout=layout).rows(dist.get_rank(group), shape[dim])
    return torch.equal(own, whole.index_select(dim, rows)) and torch.equal(
        parallel.unshard(own, group, dim, layout), whole
    )


def shard_documents(group: Any, documents: list[int], layout: str) -> tuple[bool, Tensor, str]:
    """Whether a tensor comes back, this rank's part of it, and what a part of another length is told."""
    whole = torch.arange(2 * documents[-1]).view(2, -1)
    own = parallel.shard(whole, group, layout=layout, cu_seqlens=torch.tensor(documents))
    back = parallel.unshard(own, group, layout=layout, cu_seqlens=documents)
    try:
        parallel.unshard(own[:, 1:], group, layout=layout, cu_seqlens=documents)
    except ValueError as error:
        return torch.equal(back, whole), own[0], str(error)
    return False, own, "no error"


def unshard_lengths(group: Any, lengths: list[int], layout: str) -> Tensor | str:
    own = torch.full((1, lengths[dist.get_rank(group)]), dist.get_rank(group))
    try:
        return parallel.unshard(own, group, layout=layout)
    except ValueError as error:
        return str(error)


def sharding_gradients(group: Any, layout: str) -> tuple[Tensor, Tensor]:
    """Of a whole tensor through shard, and of a part through unshard, weighed by position (and rank)."""
    weights = torch.arange(1.0, 8.0)
    whole = torch.zeros(1, 7, requires_grad=True)
    own = parallel.shard(whole, group, layout=layout)
    (own * parallel.shard(weights[None], group, layout=layout)).sum().backward()
    part = own.detach().requires_grad_()
    (parallel.unshard(part, group, layout=layout) * weights * (1 + dist.get_rank(group))).sum().backward()
    assert whole.grad is not None
    assert part.grad is not None
    return whole.grad, part.grad


def drop_with_a_drawn_seed(group: Any) -> Tensor:
    """The dropped probabilities of this rank's queries: values are unit vectors, scores alike."""
    torch.manual_seed(3 + dist.get_rank(group))
    zeros = torch.zeros(1, 2, 16, 4)
    values = parallel.shard(torch.eye(16).expand(1, 2, 16, 16), group, 2)
    own = parallel.shard(zeros, group, 2)
    return parallel.ring_attention(own, own, values, group=group, dropout_p=0.5)


def die_in_step(group: Any, step: int, backward: bool, hang: bool) -> str:
    """Rank 1 dies, or falls asleep, while it computes; the others say what they notice."""
    case = Case(3)
    if dist.get_rank(group) == 1:
        name, calls = ("backward" if backward else "forward"), iter(range(step))

        def fail(*arguments: Any) -> Any:
            if next(calls, None) is None:
                if hang:
                    time.sleep(SLEEP_S)
                os._exit(1)
            return original(*arguments)

        original = getattr(torch_ops, name)
        setattr(torch_ops, name, fail)
    start = time.monotonic()
    try:
        attend(group, case)
    except RuntimeError as error:
        return f"{time.monotonic() - start:.1f} {error}"
    return "no error"


def train_compiled_under_autocast(group: Any) -> list[Tensor]:
    """A projection and ring attention, checkpointed, under autocast: eager, then compiled around it."""
    projection = torch.randn(3, 8, 8, requires_grad=True)
    states = parallel.shard(torch.randn(1, 2, 12, 8), group, 2)

    def layer(states: Tensor) -> Tensor:
        query, key, value = (states @ weight for weight in projection)
        return parallel.ring_attention(query, key, value, group=group, mask=masks.causal(), dropout_p=0.3)

    # Where the compiled graph breaks, torch looks at the .grad of what is no leaf.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor", category=UserWarning)
    found = []
    for function in (layer, torch.compile(layer, backend="eager")):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(function, states, use_reentrant=False)
        assert out.dtype == torch.bfloat16
        found += [out.detach(), *torch.autograd.grad(out.float().square().sum(), projection)]
    return found


class Layer(nn.Module):
    """Attention between two projections, over all ranks of a group or on one."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.project, self.mix = group, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = (
            x.unflatten(-1, (4, 4)).transpose(1, 2) for x in self.project(states).chunk(3, -1)
        )
        if self.group is None:
            out = flashtile.attention(query, key, value, mask=masks.causal())
        else:
            options = {"group": self.group, "layout": "zigzag"}
            out = parallel.ring_attention(query, key, value, mask=masks.causal(), **options)
        return torch.tanh(self.mix(out.transpose(1, 2).flatten(2)))


def weights_after_a_step(model: nn.Module, rate: float) -> dict[str, Tensor]:
    """The whole weights, sharded or not, after a step along the gradients."""
    torch.optim.SGD(model.parameters(), lr=rate).step()
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach()
        for name, x in model.named_parameters()
    }


def train_fully_sharded(group: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Weights after a step of FSDP2 with sharded sequences, and after one of a single process."""
    states, target = torch.randn(2, 2, 24, 16)
    weights = {}
    for sharded in (True, False):
        torch.manual_seed(1)
        model = Layer(group if sharded else None)
        own_states, own_target = states, target
        if sharded:
            own_states, own_target = (parallel.shard(x, group, 1, "zigzag") for x in (states, target))
            fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        loss = (model(own_states) - own_target).square().sum()
        # FSDP averages gradients over the ranks.
        (loss * (dist.get_world_size(group) if sharded else 1)).backward()
        weights[sharded] = weights_after_a_step(model, 1e-2)
    return {name: (weights[True][name], weights[False][name]) for name in weights[True]}
