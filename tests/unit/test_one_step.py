"""Steps on the same tensors that overlap are an error of all of them, and nothing else is."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from hvdkit.engine.one_step import OneStep
from hvdkit.errors import HorovodInternalError


def do(step: OneStep, *parts: tuple[str, bool, bool]) -> None:
    for program, first, last in parts:
        with step.part(program, first=first, last=last):
            pass


def test_steps_in_turns_pass_also_after_one_that_an_exception_has_ended() -> None:
    step = OneStep(["a"])
    for program in ("one", "other", "one"):
        do(step, (program, True, False), (program, False, False), (program, False, True))
        do(step, (program, True, True))
        with contextlib.suppress(KeyError), step.part(program, first=True, last=False):
            raise KeyError


@pytest.mark.parametrize(
    "parts",
    [
        [("one", True, False), ("other", True, False), ("one", False, True)],
        [("one", True, False), ("one", True, False), ("one", False, True), ("one", False, True)],
    ],
    ids=["of two programs", "of one program, twice"],
)
def test_a_step_between_the_parts_of_another_one_is_found(parts: Sequence[tuple[str, bool, bool]]) -> None:
    step = OneStep(["a", "b", "c", "d"])
    do(step, *parts[:-1])
    with pytest.raises(HorovodInternalError, match=r"\(a, b, c, \.\.\.\) are being reduced twice at once"):
        do(step, parts[-1])
    with pytest.raises(HorovodInternalError, match="twice at once"):
        do(step, ("other", True, True))


def fails() -> pytest.RaisesExc[HorovodInternalError]:
    return pytest.raises(HorovodInternalError, match="twice at once")


def test_a_step_within_a_part_of_another_one_fails_both() -> None:
    step = OneStep(["a"])
    with fails(), step.part("one", first=True, last=True), fails():
        do(step, ("other", True, True))
