"""Which ranks wait in hvd.init(), and for how long: what they have told hvdrun, and what follows from that."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdkit.news import READY, Coming, parse_coming


class Wait(NamedTuple):
    """Ranks wait in init(). seconds: since the first of them came. over: they are to wait no longer."""

    seconds: float
    present: tuple[int, ...]
    missing: tuple[int, ...]
    over: bool


@dataclass
class ComingRanks:
    """The ranks that have called init() and have not returned from it. clock: in seconds."""

    clock: Callable[[], float] = time.monotonic
    _since_s: dict[int, float] = field(default_factory=dict)
    _wish: dict[int, Coming] = field(default_factory=dict)
    _told_s: float = 0.0  # how long they had waited when it was last told

    def hear(self, rank: int, words: Sequence[str]) -> None:
        """Note what a rank says."""
        for word in words:
            wish = parse_coming(word)
            if wish is not None:
                self._since_s[rank], self._wish[rank] = self.clock(), wish
            elif word == READY:
                self.forget(rank)

    def forget(self, rank: int) -> None:
        """Note that a rank does not wait any more."""
        self._since_s.pop(rank, None)
        self._wish.pop(rank, None)
        if not self._since_s:
            self._told_s = 0.0

    @property
    def waits(self) -> bool:
        """Is there a rank in init()?"""
        return bool(self._since_s)

    def left_s(self, members: Collection[int]) -> float | None:
        """Seconds until something is to be said or done of a wait; None if nothing is. members: who are to meet."""
        present = self._present(members)
        if not present:
            return None
        check_s, shutdown_s = self._wish[present[0]]
        due = [self._told_s + check_s] * (check_s > 0) + [shutdown_s] * (shutdown_s > 0)
        return min(due) - self._waited_s(present) if due else None

    def take_due(self, members: Collection[int]) -> Wait | None:
        """The wait of which something is to be said now, which counts as said; None if there is none."""
        left = self.left_s(members)
        if left is None or left > 0:
            return None
        present = self._present(members)
        self._told_s = self._waited_s(present)
        shutdown_s = self._wish[present[0]].shutdown_s
        missing = sorted(set(members) - set(present))
        return Wait(self._told_s, tuple(sorted(present)), tuple(missing), 0 < shutdown_s <= self._told_s)

    def _present(self, members: Collection[int]) -> list[int]:
        """Those that wait, the first that came first."""
        return sorted(self._since_s.keys() & set(members), key=lambda rank: (self._since_s[rank], rank))

    def _waited_s(self, present: Sequence[int]) -> float:
        return self.clock() - self._since_s[present[0]]
