"""The options of `flashtile train`, and the settings that they make."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from flashtile import cli_types as types
from flashtile.train.attentions import ATTENTIONS
from flashtile.train.settings import DTYPES, PRESETS, Settings

EXAMPLES = """flashtile train
flashtile train --steps 200 --attention standard --output plain
flashtile train --resume
flashtile train --resume --prompt "Ham." --sample 1000
flashtile train --text book.txt notes.txt --vocabulary 1024 --context 512
flashtile train --preset gpt3-1.3b --device cuda --compile --text corpus.txt --vocabulary 50304

The preset play learns to write like Hamlet on two cores in minutes; the others have the sizes of GPT-2 and
GPT-3, for a large GPU. Ctrl-C saves and stops; whatever stops a run, --resume goes on to the same losses."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options without a value are not set at all, so that presets and resumed runs know what was given."""
    parser.argument_default = argparse.SUPPRESS
    usual = Settings()

    def default(name: str) -> str:
        return f"default: {getattr(usual, name):g}"

    add = parser.add_argument_group("the model", "defaults are those of the preset play").add_argument
    add("--preset", choices=PRESETS, help="sizes and schedule, for the options to change (default: play)")
    for name in ("layers", "width", "heads"):
        add(f"--{name}", type=types.positive, metavar="N", help=default(name))
    add(
        "--kv-heads",
        type=types.positive,
        metavar="N",
        help="heads of keys and values; default: as many as heads",
    )
    add("--context", type=types.positive, metavar="N", help=f"tokens of a row; {default('context')}")
    add(
        "--dropout",
        type=float,
        metavar="P",
        help=f"of the softmax, the embedding and each part's result; {default('dropout')}",
    )
    add(
        "--attention",
        choices=ATTENTIONS,
        help="default: flashtile. standard drops the same entries of the softmax; sdpa draws others, "
        "so with --dropout 0 only does it have the same losses",
    )
    add("--dtype", choices=DTYPES, help="bf16: products in bfloat16, by autocast")
    add = parser.add_argument_group("the text").add_argument
    add(
        "--text", type=Path, nargs="+", metavar="FILE",
        help="UTF-8; two blank lines part documents; the last tenth is held out (default: Hamlet)",
    )  # fmt: skip
    add(
        "--vocabulary", type=types.positive, metavar="N",
        help="learn byte pairs, N tokens in all (needs tokenizers); default: bytes",
    )  # fmt: skip
    add = parser.add_argument_group("the schedule").add_argument
    add("--steps", type=types.positive, metavar="N", help=default("steps"))
    add("--batch", type=types.positive, metavar="N", help=f"rows of a forward pass; {default('batch')}")
    add(
        "--accumulate",
        type=types.positive,
        metavar="N",
        help=f"forward and backward passes of a step; {default('accumulate')}",
    )
    add(
        "--learning-rate",
        type=float,
        metavar="RATE",
        help=f"the highest, after the warm-up; {default('learning_rate')}",
    )
    add(
        "--warmup",
        type=int,
        metavar="N",
        help=f"steps of rising rate; then it falls along a cosine; {default('warmup')}",
    )
    add("--weight-decay", type=float, metavar="RATE", help=default("weight_decay"))
    add("--clip", type=float, metavar="NORM", help=f"largest norm of the gradient; 0: any; {default('clip')}")
    add("--seed", type=int, metavar="N", help=default("seed"))
    add(
        "--validate-every",
        type=types.positive,
        metavar="N",
        help=f"steps between losses of the held-out text; {default('validate_every')}",
    )
    add(
        "--validation-rows",
        type=types.positive,
        metavar="N",
        help=f"rows of it at most; {default('validation_rows')}",
    )
    add = parser.add_argument_group("the run").add_argument
    add("--output", type=Path, default=Path("train"), metavar="FOLDER", help="default: train")
    add("--resume", action="store_true", default=False, help="go on with the run in --output")
    add("--checkpoint-every", type=types.positive, default=100, metavar="N", help="steps (default: 100)")
    add("--device", type=types.device, default="cpu", help="cpu (default), cuda or cuda:N")
    add(
        "--compile", action="store_true", default=False,
        help="torch.compile the model (on a CPU: needs a C++ compiler)",
    )  # fmt: skip
    add("--sample", type=int, default=500, metavar="N", help="tokens to write at the end (default: 500)")
    add("--prompt", default="", metavar="TEXT", help="what they follow; default: a document's beginning")


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that options were given for."""
    names = (field.name for field in fields(Settings))
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if "text" in given:
        given["text"] = tuple(str(path.resolve()) for path in given["text"])
    return given


def new_settings(given: dict[str, Any]) -> Settings:
    """Those of a new run; raises ValueError."""
    return Settings(**{**PRESETS[given.get("preset", "play")], **given})


def check_same(settings: Settings, given: dict[str, Any]) -> None:
    """Refuse options that would make another run of the one that is resumed."""
    for name, value in given.items():
        if value != getattr(settings, name):
            raise ValueError(
                f"--{name.replace('_', '-')} belongs to the run that is resumed, "
                f"where it is {getattr(settings, name)}; got {value}"
            )
