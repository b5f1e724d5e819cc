"""Any combination of options against the float64 oracle, forward and backward.

scripts/fuzz.py runs the same check for thousands of cases.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from flashtile import cpu
from tests.oracle import assert_close_to_oracle, results_of_backend
from tests.strategies import Case, cases


def check(case: Case) -> None:
    actual = results_of_backend(cpu, case.problem, case.grad_out, case.grad_lse)
    assert_close_to_oracle(
        actual, case.problem, case.grad_out, case.grad_lse, tell_infinities=not case.poisoned
    )


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_combination(case):
    check(case)
