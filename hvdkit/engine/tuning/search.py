"""The search for settings: coordinate descent over noisy measurements, and the axes of a plan, as pure code."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdkit.config import Config
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.setting import MIB

#: Number of standard errors by which two medians must differ: to move while searching, and to be accepted at the end.
_FOLLOWED, _BELIEVED = 1.0, 2.5
_LEAST_GAIN = 0.01  # minimum gain as a fraction of a step; with less the first settings stay
_LAST = 4  # number of trials at the end: first, best, best, first


@dataclass(frozen=True)
class Trial:
    """Settings (`point`), and the seconds of each step with them."""

    point: Any
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median of the steps; infinite without steps."""
        return statistics.median(self.seconds) if self.seconds else math.inf

    @property
    def noise_s(self) -> float:
        """Standard error of the median, from the median absolute deviation."""
        if len(self.seconds) < 2:
            return math.inf
        spread = statistics.median(abs(step_s - self.median_s) for step_s in self.seconds)
        return 1.2533 * 1.4826 * spread / math.sqrt(len(self.seconds))


@dataclass(frozen=True)
class Outcome:
    """The result of a search: `best` is `first` unless other settings are faster beyond noise."""

    first: Trial
    best: Trial

    @property
    def gain(self) -> float:
        """The fraction of a step's time that is saved."""
        return 1 - self.best.median_s / self.first.median_s if self.best is not self.first else 0.0


class Search:
    """Coordinate descent from a first point: along each axis while steps get shorter; then best and first are compared.

    Use: train with the settings `point`, pass the seconds of the steps to tell(), and repeat until `point` is None.

    first: a dataclass of settings.
    axes: its fields that are searched, each with its values in order, including the value of `first`.
    unordered: axes whose values have no order, and are all tried.
    most: maximum number of trials, including those at the end.
    same: returns a key for a point; points with equal keys are measured once.
    """

    def __init__(
        self,
        first: Any,
        axes: Mapping[str, Sequence[Any]],
        *,
        unordered: Collection[str] = (),
        most: int,
        same: Callable[[Any], Hashable] = lambda point: point,
    ) -> None:
        self._axes, self._unordered, self._left, self._same = axes, unordered, most, same
        self._known: dict[Hashable, Trial] = {}
        self.trials: list[Trial] = []
        self.outcome: Outcome | None = None
        self._steps = self._run(first)
        self.point: Any = next(self._steps)

    def record(self, seconds: Sequence[float]) -> None:
        """Add the durations of the steps with `point`, and select the next point. seconds: () if it cannot be used."""
        trial = Trial(self.point, tuple(seconds))
        self.trials.append(trial)
        self._left -= 1
        try:
            self.point = self._steps.send(trial)
        except StopIteration as end:
            self.point, self.outcome = None, end.value

    def _run(self, point: Any) -> Generator[Any, Trial, Outcome]:
        first = best = self._known[self._same(point)] = yield point
        moved = True
        while moved:
            moved = False
            for axis in self._axes:
                for direction in self._directions(best.point, axis):
                    start = best
                    for value in direction:
                        if self._left <= _LAST:
                            break
                        nearest = replace(best.point, **{axis: value})
                        key = self._same(nearest)
                        if key not in self._known:
                            self._known[key] = yield nearest
                        trial = replace(self._known[key], point=nearest)
                        if not _is_faster(trial, best, _FOLLOWED):
                            break
                        best = trial
                    moved = moved or best is not start
                    if best is not start and axis not in self._unordered:
                        break  # the opposite direction is known
        if best is first:
            return Outcome(first, first)
        return (yield from self._compare(first.point, best.point))

    def _directions(self, point: Any, axis: str) -> list[Sequence[Any]]:
        """Return sequences of values to follow while steps get shorter: ascending, descending, or single values."""
        values = list(self._axes[axis])
        at = values.index(getattr(point, axis))
        if axis in self._unordered:
            return [[value] for value in values[:at] + values[at + 1 :]]
        return [values[at + 1 :], values[:at][::-1]]

    def _compare(self, first: Any, best: Any) -> Generator[Any, Trial, Outcome]:
        """Measure both again, in turn, because the best of many trials is partly the best by chance."""
        first_1, best_1 = (yield first), (yield best)
        best_2, first_2 = (yield best), (yield first)
        before = Trial(first, first_1.seconds + first_2.seconds)
        after = Trial(best, best_1.seconds + best_2.seconds)
        each_time = best_1.median_s < first_1.median_s and best_2.median_s < first_2.median_s
        enough = after.median_s <= (1 - _LEAST_GAIN) * before.median_s
        if each_time and enough and _is_faster(after, before, _BELIEVED):
            return Outcome(before, after)
        return Outcome(before, before)


def _is_faster(trial: Trial, other: Trial, sigmas: float) -> bool:
    return other.median_s - trial.median_s > sigmas * math.hypot(trial.noise_s, other.noise_s)


_KIB = 1024
#: Setting -> its values, in ascending order unless it is UNORDERED. The values of "algorithm" depend on the plan.
VALUES: Mapping[str, tuple[Any, ...]] = {
    "algorithm": ("auto",),
    "fusion_bytes": (256 * _KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    "progress": ("inline", "thread"),
    "buckets_in_flight": (2, 4, 8),
    "chunk_bytes": (128 * _KIB, 512 * _KIB, 2 * MIB),
}
UNORDERED = ("algorithm",)
_SHARING = ("shared_memory", "hierarchical")  # transports that have chunks


@dataclass(frozen=True)
class Shape:
    """The size of a plan, which decides which settings matter.

    nbytes: bytes of its tensors.
    transport: name of the transport.
    sharers: number of ranks on the host with most ranks.
    shards: number of shards of a bucket, see Transport; shards are divided into chunks.
    """

    nbytes: int
    transport: str
    sharers: int
    shards: int

    def same(self, settings: PlanSettings) -> Hashable:
        """Return a key that is equal for settings with the same effect on this plan."""
        bucket = min(settings.fusion_bytes or self.nbytes, self.nbytes)
        depth = min(settings.buckets_in_flight, -(-self.nbytes // max(1, bucket)))
        chunk = min(settings.chunk_bytes, -(-bucket // self.shards)) if self.transport in _SHARING else 0
        return bucket, depth, chunk, settings.progress, settings.algorithm

    def shared_bytes(self, settings: PlanSettings) -> int:
        """Return the approximate bytes of shared memory that a host needs for the plan."""
        bucket = min(settings.fusion_bytes or self.nbytes, self.nbytes)
        return self.sharers * bucket * settings.buckets_in_flight if self.transport in _SHARING else 0


def fixed_fields(config: Config) -> list[str]:
    """Return the settings that the user has changed from their defaults; they are not searched."""
    default = Config()
    return [name for name in VALUES if getattr(config, name) != getattr(default, name)]


def plan_axes(first: PlanSettings, config: Config, algorithms: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return the axes of a search that begins at `first`. algorithms: those between hosts that are worth trying."""
    fixed = fixed_fields(config)
    axes = {**VALUES, "algorithm": algorithms}
    return {name: sorted({*values, getattr(first, name)}) for name, values in axes.items() if name not in fixed}
