"""Put the measured numbers into README.md: `python -m benchmarks.readme` after `make bench`.

Everything between the marks is written anew from cpu.json and doors.json; the rest of the file stays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import doors
from benchmarks.peers import TITLES
from flashtile.bench.cases import Case
from flashtile.bench.compare import share_of_ceiling
from flashtile.bench.timing import format_seconds

BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
DOORS_BEGIN, DOORS_END = "<!-- doors:begin -->", "<!-- doors:end -->"
GROUPS = {
    "long": "Long sequences",
    "decode": "Decoding: one query against a cache",
    "small": "Short sequences",
}
COLUMNS = ["work", "flashtile", "GFLOP/s", "of ceiling", "torch SDPA", "ratio", "best other peer", "ratio"]
NOTHING = "-"


def fill(text: str, found: dict[str, Any]) -> str:
    """`text` with the numbers of one run between the marks; ValueError where it has no such place."""
    return between(text, BEGIN, END, numbers(found))


def fill_doors(text: str, found: dict[str, Any]) -> str:
    """The same for packed sequences and caches (benchmarks.doors)."""
    ceiling = f"Reading memory: {found['read_gb_per_s']:.0f} GB/s. In brackets: their time over flashtile's."
    rows = markdown(doors.COLUMNS, doors.rows(found))
    return between(text, DOORS_BEGIN, DOORS_END, f"{machine_line(found['machine'])} {ceiling}\n\n{rows}")


def between(text: str, begin: str, end: str, body: str) -> str:
    """The text with a new body between two marks in it; raises ValueError where they are missing."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the text must hold the marks {begin} and {end}, in this order")
    return f"{before}{begin}\n{body}\n{end}{after}"


def numbers(found: dict[str, Any]) -> str:
    """Machine, ceilings, one table for each group of cases, and memory by length, as Markdown."""
    parts = [machine_line(found["machine"]), ceilings_line(found["ceilings"])]
    for group, title in GROUPS.items():
        chosen = [result for result in found["results"] if result["case"]["group"] == group]
        if chosen:
            rows = (work_row(result, found["ceilings"]) for result in chosen)
            parts += [f"**{title}**", markdown(COLUMNS, rows)]
    if found["memory"]:
        parts += ["**Memory beyond inputs and results (MiB), 2 heads, head_dim 64, float32**"]
        parts += [memory_table(found["memory"])]
    return "\n\n".join(parts)


def machine_line(facts: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    return (
        f"{facts['cpu']}, {facts['threads']} threads, {facts['instruction_set']}, {facts['system']}; "
        f"{packages}{commit}."
    )


def ceilings_line(ceilings: dict[str, float | None]) -> str:
    named = {
        "fma_gflops": "{:.0f} GFLOP/s of float32 multiply-adds (FMA)",
        "bf16_dot_gflops": "{:.0f} GFLOP/s of bfloat16 dot products (dot)",
        "read_gb_per_s": "{:.0f} GB/s read from memory (read)",
    }
    again = "read_gb_per_s_of_"  # a size in MiB that decoding reads, which a cache may hold in part
    named |= {
        name: "{:.0f} GB/s reading " + name.removeprefix(again).replace("_mib", " MiB again and again")
        for name in ceilings
        if name.startswith(again)
    }
    present = [text.format(value) for name, text in named.items() if (value := ceilings[name])]
    return f"Measured ceilings: {', '.join(present)}. A ratio above 1 means that flashtile takes less time."


def work_row(result: dict[str, Any], ceilings: dict[str, float | None]) -> list[str]:
    """One case: flashtile, torch's SDPA, the fastest of the others, and how they compare."""
    case = Case(**{name: value for name, value in result["case"].items() if name != "name"})
    medians = {name: peer["seconds"]["median"] for name, peer in result["peers"].items() if "seconds" in peer}
    own, torch = medians.pop("flashtile", None), medians.pop("torch", None)
    best = min(medians, key=lambda name: medians[name], default=None)
    other = medians[best] if best else None
    return [
        case.name,
        shown(own),
        f"{case.flops / own / 1e9:.0f}" if own and case.query_length > 1 else NOTHING,
        (share_of_ceiling(case, own, ceilings) if own else "") or NOTHING,
        shown(torch),
        ratio(torch, own),
        f"{shown(other)} {TITLES[best]}" if best else NOTHING,
        ratio(other, own),
    ]


def shown(seconds: float | None) -> str:
    return NOTHING if seconds is None else format_seconds(seconds)


def ratio(theirs: float | None, own: float | None) -> str:
    return NOTHING if theirs is None or own is None else f"{theirs / own:.2f}x"


def memory_table(memory: dict[str, list[dict[str, float]]]) -> str:
    lengths = list(dict.fromkeys(point["length"] for points in memory.values() for point in points))
    rows = []
    for name, points in memory.items():
        library, direction = name.split()
        by_length = {point["length"]: f"{point['mib']:.1f}" for point in points}
        rows.append([f"{TITLES[library]}, {direction}", *(by_length.get(n, NOTHING) for n in lengths)])
    return markdown(["length", *map(str, lengths)], rows)


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    """A table whose first column is text and whose others are aligned to the right."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/cpu.json"))
    parser.add_argument("--doors", type=Path, default=Path("benchmarks/results/doors.json"))
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    options = parser.parse_args(arguments)
    text = options.readme.read_text()
    for results, put in ((options.results, fill), (options.doors, fill_doors)):
        text = put(text, json.loads(results.read_text()))
    options.readme.write_text(text)


if __name__ == "__main__":
    main()
