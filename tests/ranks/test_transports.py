"""Every transport passes every check, with two numbers of ranks; the quick tier has every check on every kind."""

from __future__ import annotations

import pytest
from bucket_checks import BUCKET_CHECKS
from message_checks import MESSAGE_CHECKS
from naive import random_numbers_as_naive
from openers import OPENERS
from phase_checks import PHASE_CHECKS
from ranks import run_ranks
from transport_checks import CHECKS

pytestmark = pytest.mark.ranks

ALL_CHECKS = {
    **CHECKS,
    **MESSAGE_CHECKS,
    **BUCKET_CHECKS,
    **PHASE_CHECKS,
    "random_numbers_as_naive": random_numbers_as_naive,
}
SIZES = (1, 2, 3, 4)


#: Transports of one class, which differ in their parameters: the quick tier has one of each row for a check.
ALIKE = (
    ("shared_memory", "shared_memory_over_gloo"),
    ("hierarchical_pairs", "hierarchical_round_robin", "hierarchical_uneven", "hierarchical_over_gloo"),
)


def _sizes(name: str, check: str) -> tuple[int, ...]:
    """Numbers of ranks for a transport and a check: two of 2 to 4, and for one check in three 1 too.

    Any two of transport, check and number of ranks are together in some case.
    """
    if name == "single":
        return (1,)
    turn = (list(OPENERS).index(name) + list(ALL_CHECKS).index(check)) % 3
    return (2 + turn, 2 + (turn + 1) % 3, *([1] if turn == 0 else []))


def _is_quick(size: int, name: str, check: str) -> bool:
    turn = list(ALL_CHECKS).index(check)
    left_out = any(name in row and name != row[turn % len(row)] for row in ALIKE)
    return size == _sizes(name, check)[0] and not left_out


CASES = [
    pytest.param(size, name, check, marks=[] if _is_quick(size, name, check) else [pytest.mark.slow])
    for size in SIZES
    for name in OPENERS
    for check in ALL_CHECKS
    if size in _sizes(name, check)
]


@pytest.mark.parametrize("size, name, check", CASES)
def test_transport_conforms(size: int, name: str, check: str) -> None:
    run_ranks(size, ALL_CHECKS[check], transport=name)
