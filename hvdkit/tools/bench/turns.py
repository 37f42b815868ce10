"""Peers take turns, a few calls at a time, round after round, so that all of them meet the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from hvdkit.engine.job_objects import allgather_object
from hvdkit.tools.bench.plan import Tell

Call = Callable[[], object]  # a float returned is the seconds of it that do not count
#: So many calls; the seconds that each took on this rank, or that one took on average.
Turn = Callable[[int], list[float]]

_MOST_CALLS = 1000


def time_in_a_row(call: Call, barrier: Call, count: int) -> list[float]:
    """The average seconds of a call, of so many in a row, after one that does not count. barrier: before the first."""
    call()
    barrier()
    outside, began = 0.0, time.perf_counter()
    for _ in range(count):
        uncounted = call()
        if isinstance(uncounted, float):
            outside += uncounted
    return [(time.perf_counter() - began - outside) / count]


def time_each(call: Call, barrier: Call, count: int) -> list[float]:
    """The seconds of each of so many calls. barrier: before each, so that all ranks begin it together."""
    times = []
    for _ in range(count):
        barrier()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def plan_calls(turns: Mapping[str, Turn], seconds: float) -> dict[str, int]:
    """How many calls each peer's turn needs to take about so many seconds; the same on all ranks."""
    return {name: max(1, min(_MOST_CALLS, int(seconds / _slowest(turn(3))))) for name, turn in turns.items()}


def count_rounds(tell: Tell, what: str, rounds: int, *, before: int = 0, of: int) -> Callable[[], None]:
    """A function to be called after each round, which tells how many are done. before: this work; of: in all."""
    done = iter(range(before, before + rounds + 1))

    def tell_next() -> None:
        tell(what, next(done), of)

    tell_next()
    return tell_next


def take_turns(
    turns: Mapping[str, Turn], calls: Mapping[str, int], rounds: int, progress: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds a call of every peer in every round; collective.

    Of a call the slowest rank's time counts; of the calls of a turn, the median. progress: is called after each round.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            times[name].append(_slowest(turn(calls[name])))
        progress()
    return times


def _slowest(seconds: list[float]) -> float:
    """Collective, so no rank begins another turn before all have ended this one."""
    slowest: list[float] = [max(each) for each in zip(*allgather_object(seconds), strict=True)]
    return statistics.median(slowest)
