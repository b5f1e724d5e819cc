"""The command line, `flashtile COMMAND`: info, check, bench, demo, train and lab (or `python -m flashtile`).

Results go to stdout (text, or JSON with --json), progress to stderr. Exit codes: 0 fine, 1 a check failed,
2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flashtile

if TYPE_CHECKING:
    from flashtile.bench.cases import Case

_DTYPES = ("fp32", "bf16", "fp16", "fp64")


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
    _add_bench(commands)
    _add_demo(commands)
    _add_train(commands)
    _add_lab(commands)
    return parser


def _command(commands: Any, name: str, summary: str, run: Any, examples: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.add_argument("--threads", type=_positive, metavar="N", help="threads to use (default: torch's)")
    return command


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _device(text: str) -> str:
    """An argparse type: a device that torch knows the name of."""
    import torch

    try:
        return str(torch.device(text))
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}") from error


def _subset(allowed: Sequence[str]) -> Any:
    """An argparse type: some of `allowed`, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for item in chosen:
            if item not in allowed:
                raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed)}, got {item!r}")
        return chosen

    return parse


def _shape(text: str) -> tuple[int, int, int, int]:
    try:
        batch, heads, length, head_dim = (_positive(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected BATCH,HEADS,LENGTH,HEAD_DIM, got {text!r}") from None
    return batch, heads, length, head_dim


def _bytes(text: str) -> int:
    """An argparse type: 65536, 64k or 1m, in bytes."""
    digits, unit = (text[:-1], text[-1].lower()) if text[-1:].lower() in ("k", "m") else (text, "")
    try:
        return _positive(digits) * {"": 1, "k": 2**10, "m": 2**20}[unit]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected bytes such as 196608, 192k or 1m, got {text!r}") from None


def _tile(text: str) -> tuple[int, int]:
    try:
        rows, columns = (_positive(part) for part in text.split("x"))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"expected ROWSxCOLUMNS such as 64x128, got {text!r}") from None
    return rows, columns


def _add_info(commands: Any) -> None:
    info = _command(
        commands,
        "info",
        "instruction set, threads, versions, cache folder, and what serves a call",
        _info,
        """flashtile info
flashtile info --dtype bf16 --heads 32 --kv-heads 8 --query-length 1 --key-length 8192 --head-dim 128
flashtile info --json""",
    )
    call = info.add_argument_group("the call to explain")
    call.add_argument("--dtype", choices=_DTYPES, default="fp32")
    call.add_argument("--device", type=_device, default="cpu", help="cpu (default), cuda or cuda:N")
    call.add_argument("--heads", type=_positive, default=8, metavar="N")
    call.add_argument("--kv-heads", type=_positive, metavar="N", help="default: as many as heads")
    call.add_argument("--query-length", type=_positive, default=4096, metavar="N")
    call.add_argument("--key-length", type=_positive, metavar="N", help="default: the query length")
    call.add_argument("--head-dim", type=_positive, default=64, metavar="N")
    call.add_argument("--value-head-dim", type=_positive, metavar="N", help="default: the head dim")


def _info(options: argparse.Namespace) -> int:
    from flashtile import dispatch
    from flashtile.bench import machine
    from flashtile.bench.cases import DTYPES

    names = ("device", "heads", "kv_heads", "query_length", "key_length", "head_dim", "value_head_dim")
    explanation = dispatch.explain(
        dtype=DTYPES[options.dtype], **{name: getattr(options, name) for name in names}
    )
    facts = machine.describe()
    if options.json:
        print(json.dumps({**facts, "call": explanation.splitlines()}, indent=2))
        return 0
    versions = facts.pop("versions")
    assert isinstance(versions, dict)
    facts |= {"versions": ", ".join(f"{name} {version}" for name, version in versions.items())}
    for name, fact in facts.items():
        if fact is not None:
            print(f"{name.replace('_', ' '):<16} {fact}")
    print("\n" + explanation)
    return 0


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
        type=_subset(_DTYPES),
        metavar="LIST",
        help="fp32,bf16,fp16,fp64; default: all that the device has kernels for",
    )
    check.add_argument("--device", type=_device, default="cpu", help="cpu (default), cuda or cuda:N")
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
        "--shape", type=_shape, action="append", metavar="B,H,S,D", help="repeatable; default: 1,8,2048,64"
    )
    bench.add_argument("--kv-heads", type=_positive, metavar="N", help="default: as many as heads")
    bench.add_argument("--key-length", type=_positive, metavar="N", help="default: the query length")
    bench.add_argument("--dtype", type=_subset(_DTYPES), metavar="LIST", help="default: fp32,bf16,fp16")
    bench.add_argument("--causal", choices=("yes", "no", "both"), help="default: no")
    bench.add_argument(
        "--pass",
        dest="direction",
        type=_subset(("forward", "backward")),
        metavar="LIST",
        help="forward,backward; default: both",
    )
    bench.add_argument(
        "--group",
        type=_subset(("long", "decode", "small")),
        metavar="LIST",
        help="ready cases instead of one of your own: long,decode,small",
    )
    bench.add_argument(
        "--against", type=_subset(("torch", "standard")), default=["torch", "standard"], metavar="LIST"
    )
    bench.add_argument("--rounds", type=_positive, default=7, help="measurements of each; the median counts")
    bench.add_argument("--seconds", type=float, default=10, help="at most about this long per case")
    bench.add_argument("--no-ceilings", action="store_true", help="do not measure what the machine can do")
    bench.set_defaults(refuse=bench.error)


def _bench(options: argparse.Namespace) -> int:
    import torch

    from flashtile.bench import compare, machine

    cases, libraries = _bench_cases(options), ["flashtile", *options.against]
    threads = torch.get_num_threads()
    measured = None if options.no_ceilings else compare.measure_ceilings(cases, threads)
    results = compare.measure(cases, libraries, options.rounds, options.seconds)
    facts = machine.describe()
    if options.json:
        print(json.dumps({"machine": facts, "ceilings": measured, "results": results}, indent=2))
        return 0
    print(f"{facts['cpu']}, {facts['threads']} threads, {facts['instruction_set']}")
    if measured:
        print(", ".join(f"{name.replace('_', ' ')} {value:.0f}" for name, value in measured.items() if value))
    print(compare.report(results, measured))
    for result in results:
        for library, reason in result["left_out"].items():
            print(f"  left out: {library} for {result['case']['name']}: {reason}")
    return 0


def _bench_cases(options: argparse.Namespace) -> list[Case]:
    from flashtile.bench.cases import Case, all_cases

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
    demo.add_argument("--output", type=Path, default=Path("demo"), help="folder for demo.png and demo.json")
    demo.add_argument("--minutes", type=float, default=4, help="aim for at most this long (default: 4)")
    demo.add_argument(
        "--quick", action="store_true", help="small sizes: a look at everything in well under a minute"
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
    options.add_options(train, _positive, _device)
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
    lab.add_argument("--seq", type=_positive, metavar="N", help="queries and keys; default: 4096, traced 256")
    lab.add_argument("--dim", type=_positive, metavar="N", help="head_dim; default: 64")
    lab.add_argument(
        "--sram",
        type=_bytes,
        metavar="BYTES",
        help="memory on the chip; default: 192k, an A100's; traced 16k",
    )
    lab.add_argument("--blocks", type=_tile, metavar="RxC", help="tiles of so many queries and keys instead")
    lab.add_argument("--heads", type=_positive, metavar="N", help="default: 1")
    lab.add_argument("--batch", type=_positive, metavar="N", help="default: 1")
    lab.add_argument("--causal", action="store_true", help="skip the tiles that a causal mask hides")
    lab.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), help="default: fp16")
    lab.add_argument(
        "--cards",
        type=_subset(("a100", "h100", "h200", "cpu")),
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
