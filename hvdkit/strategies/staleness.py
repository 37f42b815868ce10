"""Bounded delay: decides which ranks may continue, so that no change is computed on values that are too old.

Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014.
"""

from __future__ import annotations

from collections.abc import Collection


class StalenessClock:
    """The numbers of steps of `size` ranks that one server has counted.

    staleness: a rank waits when it has sent more changes than this since another rank began its present step. So
    an always slower rank does not delay a rank that is at most staleness + 1 times as fast. scaled: multiply changes by
    1 / (1 + s); s is the number of changes of other ranks since this rank received its values, divided by `size` and
    rounded down: 0 for ranks of equal speed.
    """

    def __init__(self, size: int, staleness: int, *, scaled: bool) -> None:
        self._size, self._staleness, self._scaled = size, staleness, scaled
        self._steps = [0] * size
        self._finished: set[int] = set()
        self._pushes = 0
        self._read = [0] * size  # number of pushes when the rank received its values
        self._seen = [[0] * size for _ in range(size)]  # the steps of all ranks at that time

    def push(self, rank: int) -> float:
        """Count a change of this rank; returns the factor to multiply it with."""
        others = self._pushes - self._read[rank]
        self._pushes += 1
        self._steps[rank] += 1
        return 1.0 / (1 + others // self._size) if self._scaled else 1.0

    def finish(self, rank: int) -> None:
        """Record that this rank makes no further steps; other ranks then do not wait for it."""
        self._finished.add(rank)

    def pop_released(self, waiting: Collection[int]) -> list[int]:
        """Return the waiting ranks that get the values now, and count them as released.

        Finished ranks get the values together, when all have finished.
        """
        if len(self._finished) == self._size:
            self._finished = set()
            released = sorted(waiting)
        else:
            training = [rank for rank in range(self._size) if rank not in self._finished and rank not in waiting]
            released = [
                rank
                for rank in sorted(waiting)
                if rank not in self._finished
                and all(self._steps[rank] - self._seen[other][rank] <= self._staleness for other in training)
            ]
        for rank in released:
            self._read[rank] = self._pushes
            self._seen[rank] = list(self._steps)
        return released
