"""Attention over several processes beside one: `python -m benchmarks.parallel`.

    python -m benchmarks.parallel --quick          short sequences, two rounds: does everything work?
    python -m benchmarks.parallel --ranks 2        only two processes
    python -m benchmarks.parallel --length 16384 --kv-heads 2 --dtype bf16

Starts gloo processes of one thread each, checks every way against one process, then times them in turn:
forward, and the backward pass alone. Writes parallel.json and parallel.png.

On one machine processes share its cores, its caches and its memory, and messages are copies: efficiency says
what the exchange costs there, not what a network would. It is the time of one process with one thread over P
times that of P processes; where P is larger than the number of cores, no more than cores / P of it can be
had, which "of cores" takes into account. One process with as many threads as cores stands beside it: what
the same cores do without any exchange.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile import masks, parallel, torch_ops
from flashtile.bench import machine
from flashtile.bench.console import Progress, table
from flashtile.bench.timing import Timing, format_seconds
from flashtile.lab import scaling
from flashtile.parallel import exchange
from flashtile.parallel.layouts import even_layout, positions_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CAUSAL = masks.causal()
PAUSE = 0.02  # seconds before a measurement, in which what the last one left behind comes to rest


@dataclass(frozen=True)
class Work:
    """The sequence, causal; batch 1."""

    length: int = 8192
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "fp32"

    def inputs(self) -> list[Tensor]:
        """Query, key, value and the gradient of the output, the same in every process."""
        generator = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [
            torch.randn(1, count, self.length, self.head_dim, generator=generator).to(DTYPES[self.dtype])
            for count in heads
        ]

    def shape(self) -> scaling.Shape:
        size = DTYPES[self.dtype].itemsize
        return scaling.Shape(self.length, self.heads, self.kv_heads, self.head_dim, element_size=size)


@dataclass(frozen=True)
class Way:
    """How so many processes attend; ``method`` "one process" is plain ``flashtile.attention``."""

    method: str
    ranks: int = 1
    layout: str = "contiguous"
    overlap: bool = True
    threads: int = 1

    @property
    def name(self) -> str:
        if self.method == "one process":
            return f"one process, {self.threads} thread{'s' if self.threads > 1 else ''}"
        return ", ".join([self.method, self.layout, *([] if self.overlap else ["no overlap"])])

    @property
    def split(self) -> scaling.Split | None:
        """For the formula of the bytes; there is none for a ring that leaves out what nobody sees."""
        if self.method == "ulysses":
            return scaling.Split(heads=self.ranks)
        if self.method == "mesh":
            return scaling.Split(self.ranks // 2, 2)
        if self.method == "allgather":
            return scaling.Split(self.ranks, gathering=True)
        return scaling.Split(self.ranks) if self.layout == "zigzag" else None


def ways(ranks: list[int], cores: int) -> list[Way]:
    found = [Way("one process", threads=threads) for threads in sorted({1, cores})]
    for count in ranks:
        found += [
            Way("ring", count, "zigzag"),
            Way("ring", count, "zigzag", overlap=False),
            Way("ring", count, "contiguous"),
            Way("allgather", count, "zigzag"),
            Way("ulysses", count),
        ]
        if count > 2 and count % 2 == 0:
            found.append(Way("mesh", count, "zigzag"))
    return found


class Rank:
    """One process, its groups and its parts of the sequence."""

    def __init__(self, rank: int, work: Work, sizes: set[int]) -> None:
        self.rank, self.work = rank, work
        # Every process takes part in making every group.
        self.groups = {size: dist.new_group(list(range(size))) for size in sorted(sizes)}
        self.meshes = {
            size: DeviceMesh("cpu", torch.arange(size).view(-1, 2))
            for size in sorted(sizes)
            if size > 2 and size % 2 == 0
        }
        self.whole = work.inputs()

    def call(self, way: Way) -> tuple[list[Tensor], Callable[[], Tensor]]:
        """This rank's query, key, value and gradient of the output, and the call that attends."""
        if way.method == "one process":
            inputs = [tensor.clone().requires_grad_() for tensor in self.whole]
            return inputs, lambda: flashtile.attention(*inputs[:3], mask=CAUSAL)
        where: Any = self.meshes[way.ranks] if way.method == "mesh" else self.groups[way.ranks]
        inputs = [
            parallel.shard(tensor, where, 2, way.layout).clone().requires_grad_() for tensor in self.whole
        ]
        options: dict[str, Any] = {"mesh" if way.method == "mesh" else "group": where}
        if way.method != "ulysses":
            options["layout"] = way.layout
        attend = getattr(parallel, f"{way.method}_attention")
        return inputs, lambda: attend(*inputs[:3], mask=CAUSAL, **options)

    def prepare(self, way: Way) -> dict[str, Callable[[], Any]]:
        """The two passes of a way."""
        inputs, attend = self.call(way)
        out = attend()

        def forward() -> Any:
            with torch.no_grad():
                return attend()

        def backward() -> Any:
            return torch.autograd.grad(out, inputs[:3], inputs[3].detach(), retain_graph=True)

        return {"forward": forward, "backward": backward}

    def check(self, way: Way, exact: list[Tensor]) -> None:
        """Output and gradients have to be those of one process, but for the order of sums."""
        inputs, attend = self.call(way)
        out = attend()
        found = [out.detach(), *torch.autograd.grad(out, inputs[:3], inputs[3].detach())]
        where: Any = self.meshes[way.ranks] if way.method == "mesh" else self.groups[way.ranks]
        for name, ours, whole in zip(("output", "dquery", "dkey", "dvalue"), found, exact, strict=True):
            expected = parallel.shard(whole, where, 2, way.layout)
            error = float((ours - expected).abs().max() / expected.abs().max())
            allowed = 64 * torch.finfo(ours.dtype).eps  # thousands of keys are summed in another order
            assert error < allowed, f"{way.name}: {name} differs by {error:.2g}, more than {allowed:.2g}"


@contextlib.contextmanager
def kernel_seconds() -> Iterator[list[float]]:
    """Processor time of every kernel in the block: what a rank computes, whoever it shares its core with."""
    found: list[float] = []
    originals = {name: getattr(torch_ops, name) for name in ("forward", "backward")}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.thread_time()
            result = function(*arguments)
            found.append(time.thread_time() - start)
            return result

        return run

    for name, function in originals.items():
        setattr(torch_ops, name, timed(function))
    try:
        yield found
    finally:
        for name, function in originals.items():
            setattr(torch_ops, name, function)


def measure(run: Callable[[], Any], group: Any, overlap: bool) -> dict[str, float]:
    """One call that all ranks of a group begin together."""
    with contextlib.nullcontext() if overlap else exchange.without_overlap():
        dist.barrier(group)
        time.sleep(PAUSE)
        dist.barrier(group)
        with exchange.counted() as sent, kernel_seconds() as kernels:
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
    return {"seconds": seconds, "kernels": sum(kernels), "bytes": sent.bytes}


Measured = dict[tuple[Way, str], list[dict[str, float]]]


def run_rank(rank: int, store: str, work: Work, chosen: list[Way], rounds: int, answers: str) -> None:
    """What every process does; the first one keeps the answers."""
    torch.set_num_threads(1)
    size = max(way.ranks for way in chosen)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    found = measure_all(rank, work, chosen, rounds)
    if found is not None:
        Path(answers).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure_all(rank: int, work: Work, chosen: list[Way], rounds: int) -> dict[str, Any] | None:
    """Check every way, time them in turn, and return what was found on the first rank."""
    own = Rank(rank, work, {way.ranks for way in chosen})
    inputs, attend = own.call(Way("one process"))
    out = attend()
    exact = [out.detach(), *torch.autograd.grad(out, inputs[:3], inputs[3].detach())]
    runs, measured = {}, Measured()
    with Progress("measuring", (rounds + 1) * len(chosen)) as progress:
        progress.shown &= rank == 0
        for way in chosen:
            progress.step(f"checking {way.name}")
            if rank < way.ranks:
                if way.method != "one process":
                    own.check(way, exact)
                runs[way] = own.prepare(way)
            dist.barrier()
        for _ in range(rounds):
            for way in chosen:
                progress.step(f"{way.ranks} ranks, {way.name}")
                if rank < way.ranks:
                    torch.set_num_threads(way.threads)
                    for direction, run in runs[way].items():
                        found = measure(run, own.groups[way.ranks], way.overlap)
                        measured.setdefault((way, direction), []).append(found)
                    torch.set_num_threads(1)
                dist.barrier()
    everyone: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(measured, everyone)
    return None if everyone is None else summarise(everyone, work, rounds)


def summarise(everyone: list[Measured], work: Work, rounds: int) -> dict[str, Any]:
    """Medians of the slowest rank, the kernels of each, and the bytes beside the formula."""
    results = []
    for way, direction in everyone[0]:
        taken = [everyone[rank][way, direction] for rank in range(way.ranks)]
        slowest = [max(one["seconds"] for one in at_once) for at_once in zip(*taken, strict=True)]
        formula = None
        if way.split is not None and scaling.refusal(work.shape(), way.split) is None:
            formula = scaling.sent(work.shape(), way.split, direction).bytes  # type: ignore[arg-type]
        results.append({
            "way": asdict(way),
            "name": way.name,
            "direction": direction,
            "seconds": asdict(Timing.of(slowest)),
            "kernel_seconds": [statistics.median(one["kernels"] for one in own) for own in taken],
            "bytes": [int(own[0]["bytes"]) for own in taken],
            "formula_bytes": formula,
        })  # fmt: skip
    ranks = sorted({way.ranks for way, _ in everyone[0]} - {1})
    return {
        "machine": machine.describe() | {"threads": 1},
        "work": asdict(work),
        "rounds": rounds,
        "results": results,
        "visible_pairs": {
            layout: {str(count): visible_pairs(work.length, count, layout) for count in ranks}
            for layout in ("contiguous", "zigzag")
        },
    }


def visible_pairs(length: int, ranks: int, layout: str) -> list[int]:
    """Pairs of a query of each rank and a key that it sees, causal, in one head."""
    chunks = even_layout(length, ranks, layout)  # type: ignore[arg-type]
    return [int((positions_of(own) + 1).sum()) for own in chunks]


COLUMNS = ["way", "pass", "P", "time", "efficiency", "of cores", "MB sent", "formula", "kernels, by rank"]


def efficiency(found: dict[str, Any], result: dict[str, Any]) -> float:
    """The speed of one process with one thread over that of each of the processes."""
    alone = next(
        one["seconds"]["median"]
        for one in found["results"]
        if one["way"]["method"] == "one process"
        and one["way"]["threads"] == 1
        and one["direction"] == result["direction"]
    )
    return float(alone / result["seconds"]["median"] / (result["way"]["ranks"] * result["way"]["threads"]))


def rows(found: dict[str, Any]) -> list[list[str]]:
    written = []
    for result in found["results"]:
        way, share = result["way"], efficiency(found, result)
        workers = way["ranks"] * way["threads"]
        of_cores = share * workers / min(workers, found["machine"]["cores"])
        sent, formula = max(result["bytes"]), result["formula_bytes"]
        written.append([
            result["name"],
            result["direction"],
            str(way["ranks"]),
            format_seconds(result["seconds"]["median"]),
            f"{100 * share:.0f}%",
            f"{100 * of_cores:.0f}%",
            f"{sent / 1e6:.1f}" if way["ranks"] > 1 else "-",
            f"{formula / 1e6:.1f}" if formula is not None and way["ranks"] > 1 else "-",
            " ".join(f"{seconds * 1e3:.0f}" for seconds in result["kernel_seconds"]) + " ms"
            if way["ranks"] > 1
            else "-",
        ])  # fmt: skip
    return written


def launch(work: Work, chosen: list[Way], rounds: int) -> dict[str, Any]:
    """Start the processes, and return what the first one has written."""
    size = max(way.ranks for way in chosen)
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.json"
        arguments = (f"{folder}/store", work, chosen, rounds, str(answers))
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=size)
        found: dict[str, Any] = json.loads(answers.read_text())
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Work()
    parser.add_argument("--quick", action="store_true", help="1024 positions, two rounds")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes (default: 2 4)")
    parser.add_argument("--length", type=int, help=f"positions (default: {default.length})")
    parser.add_argument("--heads", type=int, default=default.heads)
    parser.add_argument("--kv-heads", type=int, default=default.kv_heads)
    parser.add_argument("--head-dim", type=int, default=default.head_dim)
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype)
    parser.add_argument("--rounds", type=int, help="measurements of each pass (default: 9)")
    parser.add_argument(
        "--output", type=Path, help="folder (default: benchmarks/results, or benchmarks/quick)"
    )
    given = parser.parse_args(arguments)
    if min(given.ranks) < 2:
        parser.error(f"--ranks must be at least 2, got {min(given.ranks)}")
    if given.kv_heads < 1 or given.heads % given.kv_heads:
        parser.error(f"--kv-heads must divide --heads, {given.heads}, got {given.kv_heads}")
    given.length = given.length or (1024 if given.quick else default.length)
    given.rounds = given.rounds or (2 if given.quick else 9)
    given.output = given.output or Path(__file__).parent / ("quick" if given.quick else "results")
    return given


def main(arguments: list[str] | None = None) -> None:
    from benchmarks import parallel_plots

    given = parse(arguments)
    work = Work(given.length, given.heads, given.kv_heads, given.head_dim, given.dtype)
    found = launch(work, ways(given.ranks, machine.usable_cores()), given.rounds)
    print(table(COLUMNS, rows(found)))
    for layout, by_ranks in found["visible_pairs"].items():
        for count, pairs in by_ranks.items():
            shares = " ".join(f"{pair * len(pairs) / sum(pairs):.2f}" for pair in pairs)
            print(f"  visible pairs of each of {count} ranks, {layout}, over the average: {shares}")
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "parallel.json").write_text(json.dumps(found, indent=1) + "\n")
    parallel_plots.draw(found, given.output / "parallel.png")


if __name__ == "__main__":
    main()
