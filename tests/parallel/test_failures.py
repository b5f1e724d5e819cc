"""A rank that dies or stops answering makes the others fail, soon, and say in which step."""

from __future__ import annotations

import re

import pytest

from tests.parallel.jobs import die_in_step
from tests.parallel.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")  # the one server is warm there
TIMEOUT_S = 2.0


@pytest.mark.parametrize(
    ("step", "backward", "hang"), [(0, False, False), (1, True, False), (1, False, True)], ids=str
)
def test_the_others_notice(step, backward, hang):
    ranks = Ranks(3, timeout_s=TIMEOUT_S)
    try:
        said = ranks.outcomes(die_in_step, step=step, backward=backward, hang=hang)
    finally:
        ranks.close()
    for rank in (0, 2):
        seconds, message = said[rank].split(" ", 1)
        assert float(seconds) < 2 * TIMEOUT_S + 2
        # Whether a rank notices before the forward pass is over depends on whom it waits for.
        pattern = r"ring_attention(, backward)?: step [12] of 2, .*keys and values \(.* rank \d"
        assert re.match(pattern, message), message
    assert said[1] is None
