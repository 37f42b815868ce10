"""Stale synchronous parallel: which ranks may go on, from the numbers of their steps.

Source: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.
"""

from __future__ import annotations

from collections.abc import Collection


class Clocks:
    """The steps of `size` ranks as one server has seen them.

    staleness: how many steps a rank may be ahead of the slowest one that has not finished. scaled: are changes
    multiplied by 1 / (1 + their staleness)? That is the number of changes of other ranks since this rank had its
    values, in rounds of `size`, rounded down: 0 for ranks of equal speed.
    """

    def __init__(self, size: int, staleness: int, *, scaled: bool) -> None:
        self._size, self._staleness, self._scaled = size, staleness, scaled
        self._steps = [0] * size
        self._finished: set[int] = set()
        self._pushes = 0
        self._read = [0] * size  # pushes when the rank got its values

    def push(self, rank: int) -> float:
        """A change of this rank's has come; returns what it is multiplied with."""
        others = self._pushes - self._read[rank]
        self._pushes += 1
        self._steps[rank] += 1
        return 1.0 / (1 + others // self._size) if self._scaled else 1.0

    def finish(self, rank: int) -> None:
        """This rank takes no further steps, and holds nobody back."""
        self._finished.add(rank)

    def take_released(self, waiting: Collection[int]) -> list[int]:
        """Those of the waiting ranks that get the values now.

        Ranks that have finished get them together, when all have; then all clocks begin anew.
        """
        active = [self._steps[rank] for rank in range(self._size) if rank not in self._finished]
        if not active:
            self._steps, self._finished = [0] * self._size, set()
            released = sorted(waiting)
        else:
            limit = min(active) + self._staleness
            released = [rank for rank in sorted(waiting) if rank not in self._finished and self._steps[rank] <= limit]
        for rank in released:
            self._read[rank] = self._pushes
        return released
