"""What `flashtile bench` runs: the cases asked for, measured and printed."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import torch

from flashtile.bench import compare, machine
from flashtile.bench.cases import Case, all_cases


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    cases, libraries = _cases(options), ["flashtile", *options.against]
    threads = torch.get_num_threads()
    measured = None if options.no_ceilings else compare.measure_ceilings(cases, threads)
    results = compare.measure(cases, libraries, options.rounds, options.seconds)
    facts = machine.describe()
    if options.json:
        print(json.dumps({"machine": facts, "ceilings": measured, "results": results}, indent=2))
        return 0
    print(machine.headline(facts))
    if measured:
        print(compare.ceilings_line(measured))
    print(compare.report(results, measured))
    for result in results:
        for library, reason in result["left_out"].items():
            print(f"  left out: {library} for {result['case']['name']}: {reason}")
    return 0


def _cases(options: argparse.Namespace) -> list[Case]:
    if options.group:
        own = {"kv_heads": "--kv-heads", "key_length": "--key-length", "direction": "--pass"}
        own |= {name: f"--{name}" for name in ("shape", "dtype", "causal")}
        given = sorted(flag for name, flag in own.items() if getattr(options, name) is not None)
        if given:
            options.refuse(f"--group has sizes, dtypes and passes of its own; leave out {', '.join(given)}")
        return [case for case in all_cases() if case.group in options.group]
    base = [Case("shape", *shape) for shape in options.shape or [(1, 8, 2048, 64)]]
    for case in base:
        if case.heads % (options.kv_heads or 1):
            options.refuse(f"--kv-heads must divide the {case.heads} heads, got {options.kv_heads}")
    return [
        replace(
            case,
            dtype=dtype,
            causal=is_causal,
            direction=direction,
            kv_heads=options.kv_heads,
            key_length=options.key_length,
        )
        for case in base
        for direction in options.direction or ("forward", "backward")
        for dtype in options.dtype or ("fp32", "bf16", "fp16")
        for is_causal in {"yes": (True,), "both": (False, True)}.get(options.causal, (False,))
    ]
