"""Which rank is late: found from what each waits for, told seldom, and not for noise."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from hvdkit.engine.observe.observer import PlanObserver
from hvdkit.engine.observe.recording import PlanFacts
from hvdkit.engine.observe.stragglers import Stragglers, Window, find_late

MS = 1e-3


def window(waited_ms: float, turn: int = 0, plan: str = "optimizer.1") -> Window:
    return Window(plan, 50 * turn, 50 * turn + 49, waited_ms * MS, 100 * MS)


def late(*waits_ms: float, percent: float = 20.0) -> tuple[int, ...]:
    found = find_late(dict(enumerate(map(window, waits_ms))), percent)
    return () if found is None else found.ranks


def test_who_waits_least_is_late() -> None:
    assert late(40, 2, 41, 39) == (1,)
    assert late(0, 40) == (0,)
    assert late(40, 40, 1, 1) == (2, 3)


def test_little_or_equal_waiting_is_nobodys_fault() -> None:
    assert late(60, 58, 61, 59) == ()  # a slow network
    assert late(15, 0, 15, 15) == ()
    assert late(15, 0, 15, 15, percent=10) == (1,)


def test_a_few_that_are_early_make_nobody_late() -> None:
    assert late(40, 1, 2, 0) == ()


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def on_message(stragglers: Stragglers, turn: int, waits_ms: Sequence[float], plan: str = "optimizer.1") -> None:
    for rank, waited in enumerate(waits_ms):
        stragglers.on_message(rank, [window(waited, turn, plan)])


def listen(percent: float = 20.0) -> tuple[Stragglers, _Clock]:
    clock = _Clock()
    return Stragglers(4, lambda rank: f"rank {rank} (host n{rank // 2})", percent, clock), clock


def test_a_rank_is_told_of_once_it_has_been_late_for_long(caplog: pytest.LogCaptureFixture) -> None:
    stragglers, clock = listen()
    with caplog.at_level(logging.WARNING, "hvdkit"):
        for turn, expected in enumerate([0, 0, 0, 1, 1, 1]):
            on_message(stragglers, turn, [30, 30, 30, 0 if turn else 30])
            assert len(caplog.records) == expected
        clock.now = 700.0
        on_message(stragglers, 6, [30, 30, 30, 0])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith(
        "The other ranks wait for rank 3 (host n1), which has been 30 ms late in each step of 100 ms"
    )
    assert "since step 50." in said[0] and "HVDKIT_STRAGGLER_PERCENT=0" in said[0]


def test_noise_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    stragglers, _ = listen()
    random = np.random.default_rng(0)
    with caplog.at_level(logging.WARNING, "hvdkit"):
        for turn in range(40):
            waits = [30.0] * 4
            waits[random.integers(4)] = 0.0  # late, but another one each time
            on_message(stragglers, turn, waits if turn % 3 else [30, 30, 30, 30])
    assert not caplog.records


def test_it_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    stragglers, _ = listen(percent=0)
    with caplog.at_level(logging.WARNING, "hvdkit"):
        for turn in range(9):
            on_message(stragglers, turn, [30, 30, 30, 0])
    assert not caplog.records


def test_a_rank_that_has_joined_leaves_the_others_uncompared(caplog: pytest.LogCaptureFixture) -> None:
    stragglers, _ = listen()
    with caplog.at_level(logging.WARNING, "hvdkit"):
        for turn in range(9):
            on_message(stragglers, turn, [30, 30, 0] if turn % 2 else [30, 30, 30, 0])
    assert not caplog.records


def test_windows_end_with_the_same_rounds_on_all_ranks_and_are_longer_for_many() -> None:
    for ranks, length in ((2, 50), (64, 50), (65, 100)):
        told: list[Window] = []
        facts = PlanFacts("optimizer.1", tuple(range(ranks)), (8,), (8,), ("w",), threaded=False)
        observer = PlanObserver(facts, report=told.append)
        for number in range(2 * length):
            observer.round_ended(number, waited_s=number % 3)
        assert [(one.first, one.last) for one in told] == [(1, length - 1), (length, 2 * length - 1)]
        assert all(one.waited_s == 1 and one.round_s > 0 for one in told), "medians"
