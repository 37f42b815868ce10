"""Stragglers: ranks that are late in several windows of rounds; rank 0 of a group finds them by each rank's waits.

A late rank finds the others ready and waits least. Comparing waits needs no common clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdkit.log import logger

_LEAST_S = 0.001  # shorter delays are not reported
_TIMES = 3  # consecutive windows; on a busy machine ranks are late in turn, for fewer windows
_SILENT_S = 600.0  # minimum time between two reports of the same ranks


@dataclass(frozen=True)
class Window:
    """Some rounds of a plan on one rank.

    plan: name of the plan.
    first: number of the first round.
    last: number of the last round.
    waited_s: median of the waits in a round.
    round_s: median of the durations of a round.
    """

    plan: str
    first: int
    last: int
    waited_s: float
    round_s: float


@dataclass(frozen=True)
class Late:
    """Ranks that the others wait for: by_s seconds in each round of round_s seconds."""

    ranks: tuple[int, ...]
    by_s: float
    round_s: float


def find_late(windows: Mapping[int, Window], percent: float) -> Late | None:
    """Find the ranks for which most others wait during more than `percent` of a round; None without such ranks.

    windows: of the same rounds, by rank. If less than half of the ranks wait, no rank is late: the waiting ranks are
    early.
    """
    waits = {rank: window.waited_s for rank, window in windows.items()}
    usual = median(waits.values())
    round_s = median(window.round_s for window in windows.values())
    least_s = max(_LEAST_S, percent / 100 * round_s)
    ranks = tuple(rank for rank, wait_s in sorted(waits.items()) if usual - wait_s > least_s)
    if not ranks:
        return None
    return Late(ranks, usual - min(waits[rank] for rank in ranks), round_s)


class Stragglers:
    """Reports ranks that are late in three consecutive windows of rounds.

    size: number of ranks of the group.
    who: names a rank for messages.
    percent: see find_late; 0 for never.
    now: returns the time in seconds.
    """

    def __init__(
        self, size: int, who: Callable[[int], str], percent: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._size, self._who, self._percent, self._now = size, who, percent, now
        self._windows: dict[str, dict[int, Window]] = {}
        self._late: dict[str, dict[int, list[int]]] = {}  # plan -> rank -> first rounds of windows
        self._reported_s: dict[tuple[str, tuple[int, ...]], float] = {}

    def on_message(self, rank: int, windows: Sequence[Window]) -> None:
        """Add windows that a rank has sent, and report stragglers when all ranks' windows have arrived."""
        if self._percent > 0 and self._size > 1:
            for window in windows:
                self._hear(rank, window)

    def _hear(self, rank: int, window: Window) -> None:
        known = self._windows.setdefault(window.plan, {})
        if any(each.last != window.last for each in known.values()):
            known.clear()  # a joined rank has sent no window of those rounds
            self._late.pop(window.plan, None)
        known[rank] = window
        if len(known) == self._size:
            self._judge(window, find_late(known, self._percent))
            known.clear()

    def _judge(self, window: Window, late: Late | None) -> None:
        before = self._late.get(window.plan, {})
        ranks = late.ranks if late is not None else ()
        self._late[window.plan] = known = {rank: [*before.get(rank, ()), window.first] for rank in ranks}
        again = tuple(rank for rank, firsts in known.items() if len(firsts) >= _TIMES)
        if late is None or not again:
            return
        key, now = (window.plan, again), self._now()
        if key in self._reported_s and now - self._reported_s[key] < _SILENT_S:
            return
        self._reported_s[key] = now
        since = min(known[rank][0] for rank in again)
        logger.warning("%s", describe_late(late, [self._who(rank) for rank in again], since))


def describe_late(late: Late, names: list[str], since: int) -> str:
    """Describe late ranks for the report. names: of the late ranks. since: number of the first round."""
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    verb = "has" if len(names) == 1 else "have"
    return (
        f"The other ranks wait for {some}, which {verb} been {1e3 * late.by_s:.3g} ms late in each step of "
        f"{1e3 * late.round_s:.3g} ms since step {since}. Run `hvdkit profile` to find the cause. "
        "HVDKIT_STRAGGLER_PERCENT=0 disables this warning."
    )


def median(values: Iterable[float]) -> float:
    """Return the median; for an even number of values the higher. The module `statistics` takes long to import."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
