"""Rows of a batch for ranks of unequal speed: a plan that all ranks compute alike, and when to change it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

Shares = tuple[int, ...]

#: Of the time of a step: a plan that saves less is not worth a change, since speeds are measured with noise.
_GAIN = 0.05
#: Weight of the newest measurement of a rank's time for a row.
_NEWEST = 0.5


def shares(speeds: Sequence[float], rows: int, *, least: int = 1) -> Shares:
    """Divide `rows` among ranks so that the last of them ends as early as possible.

    speeds: rows a second of each rank, in any unit, above 0. least: rows of each rank, at least.
    A faster rank never gets less than a slower one, and of equal ones the first get more. The same on all machines:
    no result depends on the order of a sum.
    Raises ValueError for a speed that is not above 0, or fewer than `least` rows a rank.
    Source: the method of D'Hondt, which minimises the largest ratio of rows to speed.
    """
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(f"speeds are {list(speeds)}; give a finite number above 0 for each rank")
    if least < 0 or rows < least * len(speeds):
        raise ValueError(f"{rows} rows are too few for {len(speeds)} ranks with at least {least} each")
    fixed: set[int] = set()
    while True:  # ranks whose part would be below `least` get that, and the others divide the rest
        free = [rank for rank in range(len(speeds)) if rank not in fixed]
        rest = rows - least * len(fixed)
        total = math.fsum(speeds[rank] for rank in free)
        parts = {rank: rest * (speeds[rank] / total) for rank in free}
        slow = {rank for rank, part in parts.items() if part < least}
        if not slow or len(slow) == len(free):
            break
        fixed |= slow
    plan = [least] * len(speeds)
    for rank, part in parts.items():
        plan[rank] = max(least, math.floor(part * (1 - 1e-12)))  # the rounding of a part must not give a row too many
    queue = [((plan[rank] + 1) / speeds[rank], rank) for rank in free]
    heapq.heapify(queue)
    for _ in range(rows - sum(plan)):
        _, rank = queue[0]
        plan[rank] += 1
        heapq.heapreplace(queue, ((plan[rank] + 1) / speeds[rank], rank))
    return tuple(plan)


def step_s(plan: Sequence[int], speeds: Sequence[float]) -> float:
    """Seconds until the last rank has computed its rows."""
    return max(rows / speed for rows, speed in zip(plan, speeds, strict=True))


class Balance:
    """The plan of a batch, changed as measured speeds ask for it; the same on all ranks that hear the same.

    rows: of the batch. speeds: of the ranks, as far as they are known; None for equal ones. grain: each rank gets a
    multiple of so many rows, and the first of the fastest ones what is left of them.
    """

    def __init__(self, rows: int, size: int, speeds: Sequence[float] | None = None, grain: int = 1) -> None:
        if speeds is not None and len(speeds) != size:
            raise ValueError(f"speeds has {len(speeds)} numbers, but there are {size} ranks; give one for each rank")
        self._rows, self._grain = rows, grain
        self._row_s: list[float] | None = None
        self.plan = self._divide([1.0] * size if speeds is None else list(speeds))

    def _divide(self, speeds: Sequence[float]) -> Shares:
        grains, rest = divmod(self._rows, self._grain)
        plan = [self._grain * share for share in shares(speeds, grains)]
        plan[speeds.index(max(speeds))] += rest
        return tuple(plan)

    def hear(self, row_s: Sequence[float]) -> bool:
        """Take the seconds of a row that each rank has measured; returns whether the plan has changed.

        nan for a rank that has measured nothing. A rank's time that does not depend on its rows makes a row look more
        expensive where there are few; with each change the plan comes closer to equal times of the ranks.
        """
        known = self._row_s if self._row_s is not None else [math.nan] * len(row_s)
        self._row_s = [
            old if math.isnan(new) else new if math.isnan(old) else _NEWEST * new + (1 - _NEWEST) * old
            for old, new in zip(known, row_s, strict=True)
        ]
        if not all(0 < seconds < math.inf for seconds in self._row_s):
            return False
        speeds = [1 / seconds for seconds in self._row_s]
        better = self._divide(speeds)
        if step_s(better, speeds) > (1 - _GAIN) * step_s(self.plan, speeds):
            return False
        self.plan = better
        return True


def part_of_batch(plan: Shares, rows: int) -> Shares:
    """The plan of a batch, for one of `rows` rows: the last of an epoch may be smaller, and some ranks have none."""
    return plan if rows == sum(plan) else shares(plan, rows, least=0)


class Plans:
    """Which plan a batch has, on ranks that ask for their batches some steps before they train on them.

    A position is (number of the iteration over the data, number of the batch in it). Iterations are begun in order.
    """

    def __init__(self, first: Shares) -> None:
        self._plans: list[tuple[tuple[int, int], Shares]] = [((-1, 0), first)]

    def change(self, position: tuple[int, int], plan: Shares) -> None:
        """Batches have this plan from here on: from a position that no rank has asked for yet."""
        self._plans.append((position, plan))

    def at(self, position: tuple[int, int]) -> Shares:
        """The plan of a batch."""
        return next(plan for start, plan in reversed(self._plans) if start <= position)

    def forget(self, position: tuple[int, int]) -> None:
        """No batch before this one is asked for any more."""
        while len(self._plans) > 1 and self._plans[1][0] <= position:
            del self._plans[0]
