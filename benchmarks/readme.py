"""Put the measured numbers into README.md and docs/: `python -m benchmarks.readme` after `make bench`.

Everything between the marks is written anew from the files in benchmarks/results; the rest stays.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import doors, parallel
from benchmarks.peers import TITLES
from flashtile.bench import machine
from flashtile.bench.cases import Case
from flashtile.bench.compare import ceilings_line, share_of_ceiling
from flashtile.bench.timing import format_seconds

BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
DOORS_BEGIN, DOORS_END = "<!-- doors:begin -->", "<!-- doors:end -->"
PARALLEL_BEGIN, PARALLEL_END = "<!-- parallel:begin -->", "<!-- parallel:end -->"
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary:begin -->", "<!-- summary:end -->"
ERRORS_BEGIN, ERRORS_END = "<!-- errors:begin -->", "<!-- errors:end -->"
GROUPS = {
    "long": "Long sequences",
    "decode": "Decoding: one query against a cache",
    "small": "Short sequences",
}
COLUMNS = ["work", "flashtile", "GFLOP/s", "of ceiling", "torch SDPA", "ratio", "best other peer", "ratio"]
MEMORY = "**Memory beyond inputs and results (MiB), 2 heads, head_dim 64, float32**"
SUMMARY = ["work", "cases", "GFLOP/s", "of ceiling", "over torch SDPA", "over the best other peer"]
ERRORS = {"flashtile": "flashtile", "torch": "torch SDPA", "standard": "standard attention in that dtype"}
NOTHING = "-"
_NUMBER = re.compile(r"[\d.]+")


def fill(text: str, found: dict[str, Any]) -> str:
    """`text` with the numbers of one run between the marks; ValueError where it has no such place."""
    return between(text, BEGIN, END, numbers(found))


def fill_doors(text: str, *found: dict[str, Any]) -> str:
    """The same for packed sequences and caches (benchmarks.doors), machine after machine."""
    explained = (
        "Reading alone: torch's sum of as many bytes, measured in turn with the calls, and what it is of "
        "flashtile's time. In the last brackets: their time over flashtile's."
    )
    tables = [
        f"{machine_line(run['machine'])}\n\n{markdown(doors.COLUMNS, doors.rows(run))}" for run in found
    ]
    return between(text, DOORS_BEGIN, DOORS_END, "\n\n".join([explained, *tables]))


def fill_parallel(text: str, found: dict[str, Any]) -> str:
    """The same for one sequence on as many processes or threads as cores (benchmarks.parallel)."""
    facts, work = found["machine"], found["work"]
    shares: dict[str, dict[str, str]] = {}
    for result in found["results"]:
        if result["way"]["ranks"] * result["way"]["threads"] == facts["cores"]:
            share = f"{parallel.efficiency(found, result):.0%}"
            shares.setdefault(result["name"], {})[result["direction"]] = share
    explained = (
        f"{facts['cores']} cores; {work['length']} causal positions, {work['heads']} heads, "
        f"head_dim {work['head_dim']}, {work['dtype']}. Percent of {facts['cores']} times the speed of one "
        "process with one thread."
    )
    rows = ([name, own["forward"], own["backward"]] for name, own in shares.items())
    table = markdown(["way", "forward", "backward"], rows)
    return between(text, PARALLEL_BEGIN, PARALLEL_END, f"{machine_line(facts)} {explained}\n\n{table}")


def fill_summary(text: str, found: dict[str, Any]) -> str:
    """The ranges of the cases of one kind, and memory by length: what the README has room for."""
    parts = [machine_line(found["machine"]), ceilings_line(found["ceilings"])]
    parts += [markdown(SUMMARY, summary_rows(found)), MEMORY, memory_table(found["memory"])]
    return between(text, SUMMARY_BEGIN, SUMMARY_END, "\n\n".join(parts))


def fill_errors(text: str, found: dict[str, Any]) -> str:
    """The largest errors against float64 of the long cases (docs/numerics.md)."""
    largest: dict[str, dict[str, float]] = {}
    for result in found["results"]:
        case = result["case"]
        if case["group"] == "long":
            row = largest.setdefault(f"{case['direction']} {case['dtype']}", {})
            for name in ERRORS:
                if "error" in (peer := result["peers"].get(name, {})):
                    row[name] = max(row.get(name, 0.0), peer["error"])
    rows = (
        [work, *(f"{row[name]:.1e}" if name in row else NOTHING for name in ERRORS)]
        for work, row in largest.items()
    )
    return between(text, ERRORS_BEGIN, ERRORS_END, markdown(["work", *ERRORS.values()], rows))


def between(text: str, begin: str, end: str, body: str) -> str:
    """The text with a new body between two marks in it; raises ValueError where they are missing."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the text must hold the marks {begin} and {end}, in this order")
    return f"{before}{begin}\n{body}\n{end}{after}"


def numbers(found: dict[str, Any]) -> str:
    """Machine, ceilings, one table for each group of cases, and memory by length, as Markdown."""
    ratios = "A ratio above 1 means that flashtile takes less time."
    parts = [machine_line(found["machine"]), f"{ceilings_line(found['ceilings'])} {ratios}"]
    for group, title in GROUPS.items():
        chosen = [result for result in found["results"] if result["case"]["group"] == group]
        if chosen:
            rows = (work_row(result, found["ceilings"]) for result in chosen)
            parts += [f"**{title}**", markdown(COLUMNS, rows)]
    if found["memory"]:
        parts += [MEMORY, memory_table(found["memory"])]
    return "\n\n".join(parts)


def machine_line(facts: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    return f"{machine.headline(facts)}, {facts['system']}; {packages}{commit}."


def work_row(result: dict[str, Any], ceilings: dict[str, float | None]) -> list[str]:
    """One case: flashtile, torch's SDPA, the fastest of the others, and how they compare."""
    case = Case.from_dict(result["case"])
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


def summary_rows(found: dict[str, Any]) -> Iterable[list[str]]:
    """One row for the cases of one group, direction and dtype: the least and the most of each number."""
    kinds: dict[str, list[list[str]]] = {}
    for result in found["results"]:
        case = result["case"]
        kind = f"{case['group']}, {case['direction']} {case['dtype']}"
        kinds.setdefault(kind, []).append(work_row(result, found["ceilings"]))
    for kind, rows in kinds.items():
        _, _, rates, shares, _, over_torch, _, over_best = zip(*rows, strict=True)
        yield [kind, str(len(rows)), *(_span(texts) for texts in (rates, shares, over_torch, over_best))]


def _span(texts: Iterable[str]) -> str:
    """The least and the most of numbers with one unit: "12%" and "9%" are "9 to 12%"."""
    present = sorted((float(_NUMBER.findall(text)[0]), text) for text in texts if text != NOTHING)
    if not present:
        return NOTHING
    (_, least), (_, most) = present[0], present[-1]
    return most if least == most else f"{_NUMBER.findall(least)[0]} to {most}"


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
    machines = [Path(f"benchmarks/results/{name}.json") for name in ("doors", "doors_avx2")]
    parser.add_argument("--doors", type=Path, nargs="+", default=machines)
    parser.add_argument("--parallel", type=Path, default=Path("benchmarks/results/parallel.json"))
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    for page, results, put in (
        (options.readme, [options.results], fill_summary),
        (options.docs / "performance.md", [options.results], fill),
        (options.docs / "performance.md", options.doors, fill_doors),
        (options.docs / "devices.md", [options.parallel], fill_parallel),
        (options.docs / "numerics.md", [options.results], fill_errors),
    ):
        page.write_text(put(page.read_text(), *(json.loads(path.read_text()) for path in results)))


if __name__ == "__main__":
    main()
