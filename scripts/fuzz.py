"""Compare the CPU kernels with the float64 oracle on random problems: python scripts/fuzz.py --cases 2000

With --packed: packed sequences with what each gives alone, bit for bit.
Stops at the first failure, after looking for the smallest problem that fails in the same way.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1]))

from flashtile.bench.console import Progress
from tests import test_random, test_random_packed
from tests.strategies import DTYPES, cases


def main() -> None:
    arguments = parse()
    dtypes = tuple(dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") in arguments.dtypes)
    problems, check = (
        (test_random_packed.cases(dtypes), test_random_packed.check)
        if arguments.packed
        else (cases(dtypes), test_random.check)
    )
    with Progress("comparing", arguments.cases) as progress:

        @seed(arguments.seed)
        @settings(
            max_examples=arguments.cases,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(problems)
        def compare(case: Any) -> None:
            progress.step(case.description[:60])
            check(case)

        compare()
    judge = "each sequence alone" if arguments.packed else "the float64 oracle"
    print(f"{arguments.cases} random problems agree with {judge} (seed {arguments.seed})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    parser.add_argument("--cases", type=int, default=2000, help="how many problems (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other problems (default: 0)")
    parser.add_argument("--packed", action="store_true", help="packed sequences instead of batches")
    parser.add_argument("--dtypes", nargs="+", choices=names, default=names, help="default: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
