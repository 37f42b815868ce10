"""Stragglers: ranks that are late again and again, found on the first rank of a group by how long each rank waits.

A late rank finds the others ready, and waits least. So waits are compared, and no clocks of different hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdkit.log import logger

_LEAST_S = 0.001  # less is not worth a report
_TIMES = 3  # windows in a row: on a busy machine ranks take turns in being late for shorter
_SILENT_S = 600.0  # before the same ranks are reported again


@dataclass(frozen=True)
class Window:
    """Some rounds of a plan on one rank. waited_s, round_s: medians of a round's wait, and of its whole time."""

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
    """Find the ranks that most others wait for during more than `percent` of a round; None if there are none.

    windows: of the same rounds, by rank. If fewer ranks wait than do not, none is late: a few are early.
    """
    waits = {rank: one.waited_s for rank, one in windows.items()}
    usual = median(waits.values())
    round_s = median(one.round_s for one in windows.values())
    ranks = tuple(rank for rank, waited in sorted(waits.items()) if _is_late(usual - waited, round_s, percent))
    if not ranks:
        return None
    return Late(ranks, usual - min(waits[rank] for rank in ranks), round_s)


def _is_late(by_s: float, round_s: float, percent: float) -> bool:
    return by_s > max(_LEAST_S, percent / 100 * round_s)


class Stragglers:
    """Reports ranks that are late in three consecutive windows of rounds.

    size: ranks of the group. who: names one for messages. percent: see find_late; 0 for never.
    """

    def __init__(
        self, size: int, who: Callable[[int], str], percent: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._size, self._who, self._percent, self._now = size, who, percent, now
        self._windows: dict[str, dict[int, Window]] = {}
        self._late: dict[str, dict[int, list[int]]] = {}  # plan -> rank -> first rounds of windows
        self._told_s: dict[tuple[str, tuple[int, ...]], float] = {}

    def hear(self, rank: int, windows: Sequence[Window]) -> None:
        """Windows of a rank have arrived."""
        if self._percent > 0 and self._size > 1:
            for window in windows:
                self._hear(rank, window)

    def _hear(self, rank: int, window: Window) -> None:
        known = self._windows.setdefault(window.plan, {})
        if any(one.last != window.last for one in known.values()):
            known.clear()  # some rank has joined, and never told of those
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
        if key in self._told_s and now - self._told_s[key] < _SILENT_S:
            return
        self._told_s[key] = now
        since = min(known[rank][0] for rank in again)
        logger.warning("%s", tell_late(late, [self._who(rank) for rank in again], since))


def tell_late(late: Late, names: list[str], since: int) -> str:
    """The report. names: of the late ranks. since: number of a round."""
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    verb = "is" if len(names) == 1 else "are"
    return (
        f"The other ranks wait for {some}, which {verb} {1e3 * late.by_s:.3g} ms late in each step of "
        f"{1e3 * late.round_s:.3g} ms since step {since}. `hvdkit profile` says why; HVDKIT_STRAGGLER_PERCENT=0 turns "
        f"this line off."
    )


def median(values: Iterable[float]) -> float:
    """The middle one, or the higher of two. Python's statistics take long to import, and every job would."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
