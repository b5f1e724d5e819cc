"""Packed sequences and caches beside what torch offers for them: `python -m benchmarks.doors`.

    python -m benchmarks.doors --quick            short sequences: does everything work?
    python -m benchmarks.doors --cases cache      only cases whose name holds this word
    python -m benchmarks.doors --output benchmarks/results/doors_avx2.json     where there is no AVX-512
    python -m benchmarks.readme                   the numbers into docs/performance.md

One process, calls interleaved, medians. Every call is first compared with flashtile's own. Writes doors.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from flashtile import masks
from flashtile.bench import machine
from flashtile.bench.console import Progress, table
from flashtile.bench.timing import Run, format_seconds, interleave
from flashtile.cli_types import positive

OURS, PADDED = "flashtile", "torch SDPA, padded"
READING = "reading"  # what no call can do without: as many bytes as keys and values take, of other memory
CAUSAL = masks.causal()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Documents of a text corpus: most are short, a few are long.
LENGTHS = (12, 30, 31, 45, 60, 75, 90, 110, 128, 150, 190, 230, 290, 370, 480, 640, 900, 1300)


@dataclass(frozen=True)
class Comparison:
    """A case by name, the calls that do it, and for a cache one that only reads as much memory."""

    name: str
    calls: dict[str, Run]
    reading: Run | None = None
    lengths: tuple[int, ...] = ()


def cache_cases(keys: int) -> list[Comparison]:
    """One new token of one sequence, 32 query heads on 8 key heads, head_dim 128."""
    cases = []
    for short, dtype in DTYPES.items():
        query = torch.randn(1, 32, 1, 128).to(dtype)
        cache = [torch.randn(1, 8, keys, 128).to(dtype) for _ in range(2)]
        name = f"cache {short} 1x32x1x128 kv 8x{keys}"
        as_much = torch.ones(cache[0].numel() * cache[0].element_size() // 2)  # float32 for keys and values
        for layout, tensors in (("", cache), (", heads side by side", side_by_side(cache))):
            contiguous = {
                OURS: partial(flashtile.attention_kvcache, query, *tensors),
                "torch SDPA": partial(torch_sdpa, query, *tensors),
                "torch matmul": partial(grouped_matmul, query, *tensors),
            }
            cases.append(Comparison(name + layout, contiguous, as_much.sum))
        for page_size in (16, 256):
            pages, block_table = in_pages(cache, page_size)
            paged = {
                OURS: partial(flashtile.attention_kvcache, query, *pages, block_table=block_table),
                "torch SDPA": partial(gathered, torch_sdpa, query, pages, block_table),
                "torch matmul": partial(gathered, grouped_matmul, query, pages, block_table),
            }
            cases.append(Comparison(f"{name}, pages of {page_size}", paged, as_much.sum))
    return cases


def side_by_side(cache: list[Tensor]) -> list[Tensor]:
    """The heads of a key one behind the other in memory, as in flash-attn's caches."""
    return [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in cache]


def partial(function: Callable[..., Any], *arguments: Any, **options: Any) -> Run:
    def run() -> Any:
        with torch.no_grad():
            return function(*arguments, **options)

    return run


def grouped_matmul(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Standard attention, the query heads of a group as rows of one product."""
    batch, heads, length, head_dim = query.shape
    grouped = query.view(batch, key.shape[1], -1, head_dim)
    scores = grouped @ key.mT * head_dim**-0.5
    return (scores.softmax(-1) @ value).view(batch, heads, length, -1)


def in_pages(cache: list[Tensor], page_size: int) -> tuple[list[Tensor], Tensor]:
    """The same keys and values in pages in random order."""
    count = cache[0].shape[2] // page_size
    block_table = torch.randperm(count, generator=torch.Generator().manual_seed(0)).int()[None]
    pages = []
    for tensor in cache:
        kept = torch.empty(count, tensor.shape[1], page_size, tensor.shape[3], dtype=tensor.dtype)
        kept[block_table[0].long()] = tensor[0].unflatten(1, (count, page_size)).transpose(0, 1)
        pages.append(kept)
    return pages, block_table


def torch_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def gathered(
    attend: Callable[..., Tensor], query: Tensor, pages: list[Tensor], block_table: Tensor
) -> Tensor:
    """torch has no paged call: the pages are copied together first."""
    cache = (tensor[block_table[0].long()].transpose(0, 1).flatten(1, 2)[None] for tensor in pages)
    return attend(query, *cache)


def packed_cases(lengths: tuple[int, ...]) -> list[Comparison]:
    """Causal sequences of different lengths, 8 heads, head_dim 64: packed, padded, and one by one."""
    cases = []
    tokens = sum(lengths)
    for (short, dtype), backward in itertools.product(DTYPES.items(), (False, True)):
        packed = [torch.randn(tokens, 8, 64).to(dtype) for _ in range(3)]
        padded = [pad(tensor, lengths) for tensor in packed]
        starts = torch.tensor([0, *itertools.accumulate(lengths)])
        calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
            OURS: (lambda *qkv, starts=starts: flashtile.attention_varlen(*qkv, starts, mask=CAUSAL), packed),
            # Padding stands behind every sequence, so that causal hides it.
            PADDED: (lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), padded),
            "torch SDPA, one by one": (lambda *qkv, lengths=lengths: one_by_one(qkv, lengths), packed),
        }
        direction = "forward and backward" if backward else "forward"
        name = f"packed {short} {direction}, {len(lengths)} sequences, {tokens} tokens"
        runs = {
            who: training(*call) if backward else partial(call[0], *call[1]) for who, call in calls.items()
        }
        cases.append(Comparison(name, runs, lengths=lengths))
    return cases


def pad(packed: Tensor, lengths: tuple[int, ...]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(packed.split(lengths)), batch_first=True).transpose(1, 2)


def one_by_one(packed: tuple[Tensor, ...], lengths: tuple[int, ...]) -> Tensor:
    outs = [
        F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in own), is_causal=True)
        for own in zip(*(tensor.split(lengths) for tensor in packed), strict=True)
    ]
    return torch.cat([out[0].transpose(0, 1) for out in outs])


def training(function: Callable[..., Tensor], inputs: list[Tensor]) -> Run:
    """Forward and backward; the gradient that flows in is the query, which is 0 where there is padding."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]

    def run() -> Any:
        return torch.autograd.grad(function(*leaves), leaves, inputs[0])

    return run


def unpad(padded: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """(B, H, L, D) back to (total, H, D)."""
    return torch.cat([own[:, :length].transpose(0, 1) for own, length in zip(padded, lengths, strict=True)])


def check(case: Comparison) -> None:
    """Every call has to give what flashtile's gives, as far as the dtype allows."""
    own = results(case.calls[OURS])
    for who, call in case.calls.items():
        found = results(call)
        if who == PADDED:
            found = [unpad(tensor, case.lengths) for tensor in found]
        for ours, theirs in zip(own, found, strict=True):
            assert ours.shape == theirs.shape, f"{case.name}: {who} has shape {tuple(theirs.shape)}"
            error = float((ours.double() - theirs.double()).abs().max() / ours.double().abs().max())
            allowed = 64 * torch.finfo(ours.dtype).eps  # thousands of keys are summed in another order
            assert error < allowed, f"{case.name}: {who} differs by {error:.2g}, more than {allowed:.2g}"


def results(call: Run) -> list[Tensor]:
    found = call()
    return list(found) if isinstance(found, tuple) else [found]  # type: ignore[list-item]


def measure(cases: list[Comparison], rounds: int) -> dict[str, Any]:
    results = []
    with Progress("measuring", len(cases)) as progress:
        for case in cases:
            progress.step(case.name)
            check(case)
            reading = {} if case.reading is None else {READING: case.reading}
            timings = interleave(case.calls | reading, rounds)
            calls = {who: asdict(timing) for who, timing in timings.items()}
            results.append({"name": case.name, "calls": calls})
    return {"machine": machine.describe(), "results": results}


COLUMNS = ["work", "flashtile", "reading alone", "others"]


def rows(found: dict[str, Any]) -> list[list[str]]:
    """One row per case: our time, that of reading alone and its share in ours, and the others' ratios."""
    written = []
    for result in found["results"]:
        medians = {who: timing["median"] for who, timing in result["calls"].items()}
        own = medians.pop(OURS)
        read = medians.pop(READING, None)
        share = f"{format_seconds(read)} ({100 * read / own:.0f}%)" if read else "-"
        others = "; ".join(
            f"{who} {format_seconds(median)} ({median / own:.2f}x)" for who, median in medians.items()
        )
        written.append([result["name"], format_seconds(own), share, others])
    return written


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m benchmarks.doors",
    )
    parser.add_argument("--quick", action="store_true", help="short sequences, three rounds")
    parser.add_argument("--cases", default="", help="only cases whose name holds this word")
    parser.add_argument("--rounds", type=positive, default=15, help="measurements of each call (default: 15)")
    parser.add_argument(
        "--output", type=Path, help="default: doors.json in benchmarks/results, or benchmarks/quick"
    )
    given = parser.parse_args(arguments)
    if given.output is None:
        given.output = Path(__file__).parent / ("quick" if given.quick else "results") / "doors.json"
    torch.manual_seed(0)
    lengths = LENGTHS[:6] if given.quick else LENGTHS
    cases = cache_cases(512 if given.quick else 32768) + packed_cases(lengths)
    chosen = [case for case in cases if given.cases in case.name]
    if not chosen:
        parser.error(f"no case holds {given.cases!r}: {', '.join(case.name for case in cases)}")
    found = measure(chosen, 3 if given.quick else given.rounds)
    print(table(COLUMNS, rows(found)))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
