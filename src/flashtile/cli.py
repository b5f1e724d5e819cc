"""The command line: `flashtile COMMAND`, also `python -m flashtile COMMAND`.

Results go to stdout (text, or JSON with --json), progress to stderr. Exit codes: 0 fine, 1 not fine (see the
--help of a command), 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flashtile
from flashtile import cli_types as types


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough: `flashtile info | head -3`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashtile", description="Exact tiled attention for PyTorch: look at it, check it, measure it."
    )
    parser.add_argument("--version", action="version", version=f"flashtile {flashtile.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_info(commands)
    _add_check(commands)
    _add_warmup(commands)
    _add_masks(commands)
    _add_bench(commands)
    _add_demo(commands)
    _add_train(commands)
    _add_lab(commands)
    _add_explain(commands)
    return parser


def _command(
    commands: Any, name: str, summary: str, run: Any, examples: str, *, computes: bool = True
) -> argparse.ArgumentParser:
    """A command with its examples; one that ``computes`` has --json and --threads."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    if not computes:
        command.set_defaults(threads=None)
        return command
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.add_argument(
        "--threads", type=types.thread_count, metavar="N", help="threads to use (default: torch's)"
    )
    return command


def _add_info(commands: Any) -> None:
    info = _command(
        commands,
        "info",
        "instruction set, threads, versions, and what serves a call; exit code 1 if nothing does",
        _info,
        """flashtile info
flashtile info --dtype bf16 --heads 32 --kv-heads 8 --query-length 1 --key-length 8192 --head-dim 128
flashtile info --json""",
    )
    call = info.add_argument_group("the call to explain")
    call.add_argument("--dtype", type=types.dtype, default="fp32", help="fp32 (default), bf16, fp16 or fp64")
    call.add_argument("--device", type=types.device, default="cpu", help="cpu (default), cuda or cuda:N")
    call.add_argument("--heads", type=types.positive, default=8, metavar="N")
    call.add_argument("--kv-heads", type=types.positive, metavar="N", help="default: as many as heads")
    call.add_argument("--query-length", type=types.positive, default=4096, metavar="N")
    call.add_argument("--key-length", type=types.positive, metavar="N", help="default: the query length")
    call.add_argument("--head-dim", type=types.positive, default=64, metavar="N")
    call.add_argument("--value-head-dim", type=types.positive, metavar="N", help="default: the head dim")


def _info(options: argparse.Namespace) -> int:
    from flashtile import dispatch
    from flashtile.bench import machine
    from flashtile.bench.cases import DTYPES
    from flashtile.cache_folder import folder

    names = ("device", "heads", "kv_heads", "query_length", "key_length", "head_dim", "value_head_dim")
    explanation = dispatch.explain(
        dtype=DTYPES[options.dtype], **{name: getattr(options, name) for name in names}
    )
    kept = folder() or "none is writable: kernels are compiled in every process"
    facts = machine.describe() | {"cache_folder": str(kept)}
    code = 1 if dispatch.UNSERVED in explanation.splitlines() else 0
    if options.json:
        print(json.dumps({**facts, "call": explanation.splitlines()}, indent=2))
        return code
    versions = facts.pop("versions")
    assert isinstance(versions, dict)
    facts |= {"versions": ", ".join(f"{name} {version}" for name, version in versions.items())}
    for name, fact in facts.items():
        if fact is not None:
            print(f"{name.replace('_', ' '):<16} {fact}")
    print("\n" + explanation)
    return code


def _add_check(commands: Any) -> None:
    check = _command(
        commands,
        "check",
        "test every dtype and option on this machine against float64; exit code 1 if one fails",
        _check,
        """flashtile check
flashtile check --dtype fp32,bf16
flashtile check --device cuda
flashtile check --json > check.json && echo fine""",
    )
    check.add_argument(
        "--dtype",
        type=types.dtypes,
        metavar="LIST",
        help="fp32,bf16,fp16,fp64; default: all that the device has kernels for",
    )
    check.add_argument("--device", type=types.device, default="cpu", help="cpu (default), cuda or cuda:N")
    check.set_defaults(refuse=check.error)


def _check(options: argparse.Namespace) -> int:
    from flashtile import dispatch
    from flashtile.bench import check
    from flashtile.bench.cases import DTYPES

    reason = dispatch.unserved_reason(options.device.partition(":")[0])
    if reason:
        options.refuse(f"--device {options.device}: {reason}")
    served = check.DTYPES if options.device == "cpu" else check.GPU_DTYPES
    chosen = tuple(DTYPES[name] for name in options.dtype) if options.dtype else served
    verdicts = list(check.run(dtypes=chosen, device=options.device))
    if options.json:
        print(json.dumps([check.as_dict(verdict) for verdict in verdicts], indent=2))
    else:
        print(check.report(verdicts))
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def _add_warmup(commands: Any) -> None:
    warmup = _command(
        commands,
        "warmup",
        "compile the CPU kernels now, not at the first call; exit code 1 if they cannot be kept on disk",
        _warmup,
        """flashtile warmup
flashtile warmup --dtype fp32,bf16
FLASHTILE_CACHE_DIR=/opt/kernels flashtile warmup""",
    )
    warmup.add_argument(
        "--dtype", type=types.dtypes, default=["fp32", "bf16"], metavar="LIST",
        help="some of fp32,bf16,fp16,fp64; default: fp32,bf16",
    )  # fmt: skip


def _warmup(options: argparse.Namespace) -> int:
    from flashtile.bench import warmup

    result = warmup.run(options.dtype)
    print(json.dumps(result, indent=2) if options.json else warmup.report(result))
    return 0 if result["cache_folder"] else 1


def _add_masks(commands: Any) -> None:
    masks = _command(
        commands,
        "masks",
        "a picture of every kind of mask",
        _masks,
        """flashtile masks
flashtile masks --only window --size 32""",
        computes=False,
    )
    masks.add_argument("--only", metavar="NAME", help="masks whose name contains this, such as window")
    masks.add_argument(
        "--size", type=types.positive, default=16, metavar="N", help="rows and columns at most (default: 16)"
    )
    masks.set_defaults(refuse=masks.error)


def _masks(options: argparse.Namespace) -> int:
    from flashtile.masks import gallery

    wanted = (options.only or "").lower()
    shown = [example for example in gallery.examples() if wanted in repr(example[0])]
    if not shown:
        options.refuse(f"--only must be part of a mask's name, got {options.only!r}")
    print(gallery.drawn(shown, options.size))
    return 0


def _add_bench(commands: Any) -> None:
    bench = _command(
        commands,
        "bench",
        "time flashtile beside torch's SDPA and standard attention",
        _bench,
        """flashtile bench
flashtile bench --shape 1,8,4096,128 --dtype bf16 --causal both
flashtile bench --group decode,small --rounds 15
flashtile bench --shape 1,32,1,128 --kv-heads 8 --key-length 8192 --json > decode.json

`python -m benchmarks.cpu` in a checkout compares with other libraries, too.""",
    )
    bench.add_argument(
        "--shape",
        type=types.shape,
        action="append",
        metavar="B,H,S,D",
        help="repeatable; default: 1,8,2048,64",
    )
    bench.add_argument("--kv-heads", type=types.positive, metavar="N", help="default: as many as heads")
    bench.add_argument("--key-length", type=types.positive, metavar="N", help="default: the query length")
    bench.add_argument("--dtype", type=types.dtypes, metavar="LIST", help="default: fp32,bf16,fp16")
    bench.add_argument("--causal", choices=("yes", "no", "both"), help="default: no")
    bench.add_argument(
        "--pass",
        dest="direction",
        type=types.subset(("forward", "backward")),
        metavar="LIST",
        help="forward,backward; default: both",
    )
    bench.add_argument(
        "--group",
        type=types.subset(("long", "decode", "small")),
        metavar="LIST",
        help="ready cases instead of one of your own: long,decode,small",
    )
    bench.add_argument(
        "--against", type=types.subset(("torch", "standard")), default=["torch", "standard"], metavar="LIST"
    )
    bench.add_argument(
        "--rounds", type=types.positive, default=7, help="measurements of each; the median counts"
    )
    bench.add_argument(
        "--seconds", type=types.positive_number, default=10, help="at most about this long per case"
    )
    bench.add_argument("--no-ceilings", action="store_true", help="do not measure what the machine can do")
    bench.set_defaults(refuse=bench.error)


def _bench(options: argparse.Namespace) -> int:
    from flashtile.bench import command

    return command.run(options)


def _add_demo(commands: Any) -> None:
    demo = _command(
        commands,
        "demo",
        "a language model with and without flashtile, then exactness, speed and memory",
        _demo,
        """flashtile demo
flashtile demo --quick
flashtile demo --output results --minutes 10""",
    )
    demo.add_argument(
        "--output",
        type=types.new_folder,
        default="demo",
        help="folder for demo.png and demo.json (default: demo)",
    )
    demo.add_argument(
        "--minutes", type=types.positive_number, default=4, help="aim for at most this long (default: 4)"
    )
    demo.add_argument(
        "--quick",
        action="store_true",
        help="small sizes: a look at everything in about a minute, once kernels are compiled",
    )


def _demo(options: argparse.Namespace) -> int:
    from flashtile.bench import demo

    result = demo.run(options.output, minutes=options.minutes, quick=options.quick, quiet=options.json)
    if options.json:
        print(json.dumps(result, indent=2))
    return 0 if result["agrees"] else 1


def _add_train(commands: Any) -> None:
    from flashtile.train import options

    train = _command(
        commands, "train", "a GPT on Hamlet or on your own text, with checkpoints, losses and a sample",
        _train, options.EXAMPLES,
    )  # fmt: skip
    options.add_options(train)
    train.set_defaults(refuse=train.error)


def _train(options: argparse.Namespace) -> int:
    from flashtile.train import command

    return command.run(options)


def _add_lab(commands: Any) -> None:
    lab = _command(
        commands,
        "lab",
        "bytes, FLOPs and a roofline of standard attention, FlashAttention and FlashAttention-2, by theory",
        _lab,
        """flashtile lab --seq 4096 --dim 64 --sram 192k
flashtile lab --seq 65536 --dim 128 --heads 32 --causal --cards h100,cpu
flashtile lab --seq 8192 --blocks 128x64 --plot lab.png
flashtile lab --trace --seq 200 --dim 16 --sram 4k
flashtile lab --paper""",
    )
    lab.add_argument(
        "--seq", type=types.positive, metavar="N", help="queries and keys; default: 4096, traced 256"
    )
    lab.add_argument("--dim", type=types.positive, metavar="N", help="head_dim; default: 64")
    lab.add_argument(
        "--sram",
        type=types.size_in_bytes,
        metavar="BYTES",
        help="memory on the chip; default: 192k, an A100's; traced 16k",
    )
    lab.add_argument(
        "--blocks", type=types.tile, metavar="RxC", help="tiles of so many queries and keys instead"
    )
    lab.add_argument("--heads", type=types.positive, metavar="N", help="default: 1")
    lab.add_argument("--batch", type=types.positive, metavar="N", help="default: 1")
    lab.add_argument("--causal", action="store_true", help="skip the tiles that a causal mask hides")
    lab.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), help="default: fp16")
    lab.add_argument(
        "--cards",
        type=types.subset(("a100", "h100", "h200", "cpu")),
        metavar="LIST",
        help="a100,h100,h200,cpu; default: the first three; cpu is measured, which takes seconds",
    )
    lab.add_argument("--plot", type=Path, metavar="FILE", help="write a figure, too: .png, .svg or .pdf")
    lab.add_argument(
        "--trace",
        action="store_true",
        help="run the algorithms, count, and compare with theory and the oracle; exit code 1 if one differs",
    )
    lab.add_argument("--paper", action="store_true", help="the first paper's example beside the model")
    lab.set_defaults(refuse=lab.error)


def _lab(options: argparse.Namespace) -> int:
    from flashtile.lab import command

    return command.run(options)


def _add_explain(commands: Any) -> None:
    explain = _command(
        commands,
        "explain",
        "write a page that shows how FlashAttention works, step by step, to try in a browser",
        _explain,
        """flashtile explain --open
flashtile explain --language pl --output flashattention.html
flashtile explain --json""",
    )
    explain.add_argument(
        "--output", type=Path, default=Path("explainer.html"), metavar="FILE", help="default: explainer.html"
    )
    explain.add_argument(
        "--language", choices=("en", "zh", "pl"), default="en", help="to open in; the page can switch"
    )
    explain.add_argument("--open", action="store_true", help="open it in the browser")
    explain.set_defaults(refuse=explain.error)


def _explain(options: argparse.Namespace) -> int:
    from flashtile.explain import command

    return command.run(options)
