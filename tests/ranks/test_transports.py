"""Every transport passes every check, with one to four ranks; the quick tier has each pair with one number of ranks."""

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


def _marks(size: int, name: str, check: str) -> list[pytest.MarkDecorator]:
    """The quick tier has every transport with every check and, over all transports, every check with 2 to 4 ranks."""
    chosen = 1 if name == "single" else 2 + (list(OPENERS).index(name) + list(ALL_CHECKS).index(check)) % 3
    return [] if size == chosen else [pytest.mark.slow]


CASES = [
    pytest.param(size, name, check, marks=_marks(size, name, check))
    for size in SIZES
    for name in OPENERS
    for check in ALL_CHECKS
    if size == 1 or name != "single"
]


@pytest.mark.parametrize("size, name, check", CASES)
def test_transport_conforms(size: int, name: str, check: str) -> None:
    run_ranks(size, ALL_CHECKS[check], transport=name)
