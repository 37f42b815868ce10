"""Every transport passes every check, with one to four ranks."""

from __future__ import annotations

import pytest
from bucket_checks import BUCKET_CHECKS
from message_checks import MESSAGE_CHECKS
from openers import OPENERS
from phase_checks import PHASE_CHECKS
from ranks import run_ranks
from transport_checks import CHECKS

pytestmark = pytest.mark.ranks

ALL_CHECKS = {**CHECKS, **MESSAGE_CHECKS, **BUCKET_CHECKS, **PHASE_CHECKS}
#: Hosts that are simulated with three and four ranks; with two, "hierarchical_round_robin" has hosts of one rank.
AGAIN = ("hierarchical_pairs", "hierarchical_uneven", "hierarchical_over_gloo")
CASES = [
    pytest.param(size, name, check, marks=[pytest.mark.slow] if size == 2 and name in AGAIN else [])
    for size in (1, 2, 3, 4)
    for name in OPENERS
    for check in ALL_CHECKS
    if size == 1 or name != "single"
]


@pytest.mark.parametrize("size, name, check", CASES)
def test_transport_conforms(size: int, name: str, check: str) -> None:
    run_ranks(size, ALL_CHECKS[check], transport=name)
