"""Rows of a batch for ranks of unequal speed: a plan that all ranks compute alike, and the rule for changing it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

Shares = tuple[int, ...]

#: Fraction of a step's time: a plan that saves less is not worth a change, since measured speeds are noisy.
_GAIN = 0.05
#: Weight of the newest measurement of a rank's time per row.
_NEWEST = 0.5


def shares(speeds: Sequence[float], rows: int, *, least: int = 1) -> Shares:
    """Divide `rows` among ranks so that the last rank finishes as early as possible.

    speeds: rows per second of each rank, in any unit, above 0. least: smallest number of rows of a rank.
    A faster rank never gets fewer rows than a slower one, and among equal ranks the first get more. The result is the
    same on all machines: it does not depend on the order of a sum.
    Raises ValueError for a speed that is not above 0, or fewer than `least` rows a rank.
    Source: the method of D'Hondt, which minimises the largest ratio of rows to speed.
    """
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(f"speeds are {list(speeds)}; give a finite number above 0 for each rank")
    if least < 0 or rows < least * len(speeds):
        raise ValueError(f"{rows} rows are too few for {len(speeds)} ranks with at least {least} each")
    fixed: set[int] = set()
    while True:  # ranks below `least` get `least`, and the others divide the rest
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
        plan[rank] = max(least, math.floor(part * (1 - 1e-12)))  # rounding must not add a row
    queue = [((plan[rank] + 1) / speeds[rank], rank) for rank in free]
    heapq.heapify(queue)
    for _ in range(rows - sum(plan)):
        _, rank = queue[0]
        plan[rank] += 1
        heapq.heapreplace(queue, ((plan[rank] + 1) / speeds[rank], rank))
    return tuple(plan)


def step_s(plan: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the seconds until the last rank has computed its rows."""
    return max(rows / speed for rows, speed in zip(plan, speeds, strict=True))


class Balance:
    """The plan of a batch, which changes with measured speeds; equal on all ranks with the same measurements.

    rows: of the batch.
    speeds: of the ranks, if known; None for equal ones.
    grain: each rank gets a multiple of this number of rows, and the first of the fastest ranks gets the rest.
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

    def add_times(self, row_s: Sequence[float]) -> bool:
        """Add each rank's measured seconds per row; returns whether the plan has changed.

        nan: a rank without a measurement. The constant part of a rank's time makes its rows seem more expensive when it
        has few; with each change the plan approaches equal times of the ranks.
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
    """Return the plan for a batch of `rows` rows: an epoch's last batch may be smaller; some ranks then have none."""
    return plan if rows == sum(plan) else shares(plan, rows, least=0)


class Plans:
    """The plan of each batch, for ranks that request their batches some steps before they train on them.

    A position is (number of the iteration over the data, number of the batch in it). Iterations are begun in order.
    """

    def __init__(self, first: Shares) -> None:
        self._plans: list[tuple[tuple[int, int], Shares]] = [((-1, 0), first)]

    def change(self, position: tuple[int, int], plan: Shares) -> None:
        """Use this plan for batches from a position on that no rank has requested yet."""
        self._plans.append((position, plan))

    def at(self, position: tuple[int, int]) -> Shares:
        """Return the plan of a batch."""
        return next(plan for start, plan in reversed(self._plans) if start <= position)

    def forget(self, position: tuple[int, int]) -> None:
        """Drop plans of batches before this position, which are not requested any more."""
        while len(self._plans) > 1 and self._plans[1][0] <= position:
            del self._plans[0]
