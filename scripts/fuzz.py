"""Compare the CPU kernels with the float64 oracle on random problems: python scripts/fuzz.py --cases 2000

Stops at the first failure, after looking for the smallest problem that fails in the same way.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1]))

from flashtile.bench.console import Progress
from tests.strategies import DTYPES, Case, cases
from tests.test_random import check


def main() -> None:
    arguments = parse()
    dtypes = tuple(dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") in arguments.dtypes)
    with Progress("comparing", arguments.cases) as progress:

        @seed(arguments.seed)
        @settings(
            max_examples=arguments.cases,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(cases(dtypes))
        def compare(case: Case) -> None:
            progress.step(case.description[:60])
            check(case)

        compare()
    print(f"{arguments.cases} random problems agree with the float64 oracle (seed {arguments.seed})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    parser.add_argument("--cases", type=int, default=2000, help="how many problems (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other problems (default: 0)")
    parser.add_argument("--dtypes", nargs="+", choices=names, default=names, help="default: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
