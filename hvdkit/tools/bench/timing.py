"""Timing of peers in alternation, a few calls at a time, round after round, so that all see the same machine state."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from hvdkit.engine.job_objects import allgather_object


class Clock:
    """Takes timestamps of this rank's work; this class is for calls that have done their work when they return."""

    def mark(self) -> Any:
        """Take a timestamp; does not wait."""
        return time.perf_counter()

    def seconds(self, first: Any, last: Any) -> float:
        """Return the seconds between two timestamps; waits until the work up to the last one is done."""
        return float(last - first)

    def synchronize(self) -> None:
        """Wait until all work so far is done."""


class EventClock(Clock):
    """A Clock of events in the current stream of the current GPU; the host's clock would show when work was enqueued.

    module: torch.cuda, or a module with the same `Event` and `synchronize`.
    """

    def __init__(self, module: ModuleType | Any) -> None:
        self._module = module

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def synchronize(self) -> None:
        self._module.synchronize()


HOST_CLOCK = Clock()


Call = Callable[[], object]  # if it returns a float, that is subtracted from its time
#: Takes a number of calls; returns the seconds of each on this rank, or one average.
Turn = Callable[[int], list[float]]

_MOST_CALLS = 1000


def time_in_a_row(call: Call, barrier: Call, count: int, clock: Clock = HOST_CLOCK) -> list[float]:
    """Return the average seconds of a call, over `count` calls in a row after a warm-up.

    call: the call.
    barrier: called before the first timed call.
    count: number of calls.
    clock: takes the timestamps.
    Nothing waits for a GPU between the calls, so that it receives the next call's work during this one's.
    """
    call()
    clock.synchronize()
    barrier()
    excluded, start = 0.0, clock.mark()
    for _ in range(count):
        result = call()
        if isinstance(result, float):
            excluded += result
    return [(clock.seconds(start, clock.mark()) - excluded) / count]


def time_each(call: Call, barrier: Call, count: int, clock: Clock = HOST_CLOCK) -> list[float]:
    """Return the seconds of each of `count` calls.

    call: the call.
    barrier: called before each call.
    count: number of calls.
    clock: takes the timestamps.
    """
    times = []
    for _ in range(count):
        clock.synchronize()
        barrier()
        start = clock.mark()
        call()
        times.append(clock.seconds(start, clock.mark()))
    return times


def plan_calls(turns: Mapping[str, Turn], seconds: float) -> dict[str, int]:
    """Choose how many calls of each peer take about `seconds`; collective, the same on all ranks."""
    return {peer: max(1, min(_MOST_CALLS, int(seconds / _slowest(turn(3))))) for peer, turn in turns.items()}


def interleave(
    turns: Mapping[str, Turn],
    calls: Mapping[str, int],
    rounds: int,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, list[float]]:
    """Time every peer in every round; collective. Returns seconds a call, by peer and round.

    The time of a call is the slowest rank's, and the time of a round the median over its calls.

    turns: peer -> its turn.
    calls: peer -> number of calls in a round.
    rounds: number of rounds.
    progress: called after each round with the number of finished rounds.
    """
    times: dict[str, list[float]] = {peer: [] for peer in turns}
    for done in range(1, rounds + 1):
        for peer, turn in turns.items():
            times[peer].append(_slowest(turn(calls[peer])))
        progress(done)
    return times


def _slowest(seconds: list[float]) -> float:
    # Collective, so no rank starts the next peer before all ranks have finished this one.
    slowest: list[float] = [max(each) for each in zip(*allgather_object(seconds), strict=True)]
    return statistics.median(slowest)
