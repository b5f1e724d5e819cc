"""`flashtile lab`: what its options ask for."""

from __future__ import annotations

import argparse
import json
import sys

import torch

from flashtile.bench.console import Progress
from flashtile.lab import report, trace
from flashtile.lab.report import Case
from flashtile.lab.roofline import CARDS, Card, this_cpu
from flashtile.lab.setting import Blocks

_SHAPE = ("seq", "dim", "sram", "blocks", "heads", "batch", "causal", "dtype", "cards", "plot", "trace")


def run(options: argparse.Namespace) -> int:
    """Print what is asked for and return the exit code: 1 where a trace differs from theory or the oracle.

    ``options.refuse`` is called with a message for options that do not go together; it does not return.
    """
    if options.paper:
        given = [f"--{name}" for name in _SHAPE if getattr(options, name)]
        if given:
            options.refuse(f"--paper is one shape on one card; leave out {', '.join(given)}")
        print(json.dumps(report.paper_as_dict(), indent=2) if options.json else report.paper_text())
        return 0
    case = _case(options)
    if options.trace and (reason := trace.refusal(case)):
        options.refuse(f"--trace {reason}")
    cards = _cards(options)
    if options.plot is not None:
        _plot(options, case, cards)
    traced = trace.trace(case) if options.trace else []
    if options.json:
        result = report.as_dict(case, cards)
        print(json.dumps(result | {"trace": trace.as_list(traced)} if options.trace else result, indent=2))
    else:
        print(report.text(case, cards))
        if options.trace:
            print("\n" + trace.text(traced))
    return 0 if all(one.agrees for one in traced) else 1


def _case(options: argparse.Namespace) -> Case:
    if options.blocks and options.sram:
        options.refuse("--blocks takes the place of what --sram is for; give one of them")
    case = Case(
        length=options.seq or (256 if options.trace else 4096),
        head_dim=options.dim or 64,
        sram=options.sram or (16 if options.trace else 192) * 1024,
        batch=options.batch or 1,
        heads=options.heads or 1,
        causal=options.causal,
        dtype=options.dtype or "fp16",
        blocks=Blocks(*options.blocks) if options.blocks else None,
    )
    if case.sram < case.element_size:
        options.refuse(f"--sram must hold at least one number of {case.dtype}, got {case.sram} bytes")
    return case


def _cards(options: argparse.Namespace) -> list[Card]:
    cards = []
    for name in options.cards or CARDS:
        if name == "cpu":
            with Progress("measuring the machine", 1) as progress:
                progress.step("multiply-adds, bfloat16 dot products, memory")
                cards.append(this_cpu(torch.get_num_threads()))
        else:
            cards.append(CARDS[name])
    return cards


def _plot(options: argparse.Namespace, case: Case, cards: list[Card]) -> None:
    if options.plot.suffix not in (".png", ".svg", ".pdf"):
        options.refuse(f"--plot must be a file ending in .png, .svg or .pdf, got {str(options.plot)!r}")
    if not options.plot.absolute().parent.is_dir():
        options.refuse(f"--plot must be in a folder that exists, got {str(options.plot)!r}")
    try:
        from flashtile.lab import figure
    except ImportError:
        options.refuse("--plot needs matplotlib: pip install 'flashtile[plot]'")
    figure.draw(case, cards, options.plot)
    print(f"wrote {options.plot}", file=sys.stderr)
