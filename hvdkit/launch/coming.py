"""Which ranks wait in hvd.init(), and for how long: what they have told hvdrun, and what follows from that."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdkit.launcher_channel import READY, Coming, parse_coming


class Wait(NamedTuple):
    """Ranks wait in init(). seconds: since the first of them came. over: they are to wait no longer.

    part: only these ranks, present and missing, are to meet: others of the job need not come.
    """

    seconds: float
    present: tuple[int, ...]
    missing: tuple[int, ...]
    over: bool
    part: bool = False


@dataclass
class ComingRanks:
    """The ranks that have called init() and have not returned from it. clock: in seconds.

    Ranks that are to meet others, see Coming.part, wait by themselves.
    """

    clock: Callable[[], float] = time.monotonic
    _since_s: dict[int, float] = field(default_factory=dict)
    _wish: dict[int, Coming] = field(default_factory=dict)
    _told_s: dict[frozenset[int], float] = field(default_factory=dict)  # by part, the wait when it was last told

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
        parts = {wish.part for wish in self._wish.values()}
        self._told_s = {part: told for part, told in self._told_s.items() if part in parts}

    @property
    def waits(self) -> bool:
        """Is there a rank in init()?"""
        return bool(self._since_s)

    def left_s(self, members: Collection[int]) -> float | None:
        """Seconds until something is to be said or done of a wait; None if nothing is. members: who are to meet."""
        return min(self._left_by_part(members).values(), default=None)

    def take_due(self, members: Collection[int]) -> Wait | None:
        """The wait of which something is to be said now, which counts as said; None if there is none."""
        lefts = self._left_by_part(members)
        part = min(lefts, key=lambda one: lefts[one], default=frozenset())
        if lefts.get(part, 1.0) > 0:
            return None
        present = self._present(part, members)
        waited = self._told_s[part] = self._waited_s(present)
        shutdown_s = self._wish[present[0]].shutdown_s
        missing = sorted((part or set(members)) - set(present))
        return Wait(waited, tuple(sorted(present)), tuple(missing), 0 < shutdown_s <= waited, bool(part))

    def _left_by_part(self, members: Collection[int]) -> dict[frozenset[int], float]:
        """See left_s(), by part."""
        lefts: dict[frozenset[int], float] = {}
        for part in {wish.part for wish in self._wish.values()}:
            present = self._present(part, members)
            if present:
                check_s, shutdown_s, _ = self._wish[present[0]]
                due = [self._told_s.get(part, 0.0) + check_s] * (check_s > 0) + [shutdown_s] * (shutdown_s > 0)
                lefts |= {part: min(due) - self._waited_s(present)} if due else {}
        return lefts

    def _present(self, part: frozenset[int], members: Collection[int]) -> list[int]:
        """Those of a part that wait, the first that came first."""
        waiting = [rank for rank, wish in self._wish.items() if wish.part == part and rank in members]
        return sorted(waiting, key=lambda rank: (self._since_s[rank], rank))

    def _waited_s(self, present: Sequence[int]) -> float:
        return self.clock() - self._since_s[present[0]]
