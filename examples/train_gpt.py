"""A GPT learns to write like Hamlet, or like any text: `flashtile train` as a program, with all its options.

    python examples/train_gpt.py                                    minutes on two cores
    python examples/train_gpt.py --attention standard --output plain
    python examples/train_gpt.py --resume --prompt "Ham." --sample 1000
    python examples/train_gpt.py --preset gpt3-1.3b --device cuda --compile --text book.txt --vocabulary 50304

What it runs is written to be read, in src/flashtile/train: the GPT is model.py, the three attentions that it
can have are attentions.py, packed documents data.py, a step loop.py, and what survives a kill checkpoint.py.
docs/training.md does the same from Python, and says what the numbers mean.
"""

from __future__ import annotations

import sys

from flashtile import cli

if __name__ == "__main__":
    sys.exit(cli.main(["train", *sys.argv[1:]]))
