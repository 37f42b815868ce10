"""benchmarks.start: what is made of the seconds, and a command that never comes to its first step."""

from __future__ import annotations

import sys

import pytest

from benchmarks.start import judge, time_start


@pytest.mark.parametrize(("hvdrun", "met"), [([2.1, 2.2, 9.0], True), ([2.1, 3.2, 9.0], False)])
def test_the_aim_is_about_the_median_of_what_hvdrun_takes_more_in_a_round(hvdrun: list[float], met: bool) -> None:
    plain, ours = judge({"mpirun": [2.0, 2.0, 2.0], "hvdrun": hvdrun})
    assert (plain.peer, plain.median_s, plain.met) == ("mpirun", 2.0, None)
    assert (ours.peer, ours.median_s, ours.met) == ("hvdrun", sorted(hvdrun)[1], met)


def test_a_start_that_fails_is_told_with_its_output() -> None:
    command = [sys.executable, "-c", "print('no such thing'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match=r"(?s)took no step and ended with 3:.*no such thing"):
        time_start(command)
    assert time_start([sys.executable, "-c", "print('[0] stepped')"]) > 0
