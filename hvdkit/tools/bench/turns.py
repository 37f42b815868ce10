"""Peers take turns, a few calls at a time, round after round, so that all of them meet the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

import hvdkit.torch as hvd

Call = Callable[[], object]  # a float returned is the seconds of it that do not count
#: So many calls; the seconds that each took on this rank, or that one took on average.
Turn = Callable[[int], list[float]]

_MOST_CALLS = 1000


def time_in_a_row(call: Call, count: int) -> list[float]:
    """The average seconds of a call, of so many in a row, after one that does not count."""
    call()
    hvd.barrier()
    return _time_in_a_row(call, count)


def time_alone(call: Call, count: int) -> list[float]:
    """The same in a rank that is not one of hvdkit's, but of Horovod's: only the calls bring the ranks together."""
    call()
    return _time_in_a_row(call, count)


def time_each(call: Call, count: int, barrier: Call) -> list[float]:
    """The seconds of each of so many calls, which all ranks begin together. barrier: lets them."""
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


def take_turns(
    turns: Mapping[str, Turn], calls: Mapping[str, int], rounds: int, progress: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds a call of every peer in every round; collective.

    Of a call the slowest rank's time counts; of the calls of a turn, the median. progress: is called after each round.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            hvd.barrier()
            times[name].append(_slowest(turn(calls[name])))
        progress()
    return times


def _slowest(seconds: list[float]) -> float:
    return float(hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), op=hvd.Max).median())


def _time_in_a_row(call: Call, count: int) -> list[float]:
    outside, began = 0.0, time.perf_counter()
    for _ in range(count):
        uncounted = call()
        if isinstance(uncounted, float):
            outside += uncounted
    return [(time.perf_counter() - began - outside) / count]
