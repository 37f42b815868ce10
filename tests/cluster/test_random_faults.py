"""Jobs to which anything may happen, at random moments: the first few of `python -m faults`, which plays many."""

from __future__ import annotations

import pytest
from cluster.lab import Lab
from faults.plan import draw
from faults.play import play

pytestmark = pytest.mark.cluster


def test_a_job_goes_on_or_ends_clearly_whatever_happens(lab: Lab) -> None:
    play(draw(2, 3), lab)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3, 4, 7])
def test_whatever_else_happens(lab: Lab, seed: int) -> None:
    play(draw(seed, 12), lab)
