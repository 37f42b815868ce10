"""Comparison with an earlier run: which times have changed by more than noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.errors import BenchError
from hvdkit.tools.bench.plan import AS_BACKEND, IN_BUCKET, OURS
from hvdkit.tools.bench.report import Report
from hvdkit.tools.bench.summary import Summary


@dataclass(frozen=True)
class Change:
    """A peer's time of a work, before and now. noise: the runs' interquartile ranges overlap."""

    work: str
    peer: str
    before_s: float
    now_s: float
    noise: bool

    @property
    def percent(self) -> float:
        """How much longer it takes now; negative if it is faster."""
        return 100 * (self.now_s / self.before_s - 1)

    @property
    def slower(self) -> bool:
        """Slower by more than noise?"""
        return not self.noise and self.now_s > self.before_s


def compare(before: Report, now: Report) -> list[Change]:
    """Compare every work and peer that both runs have. Raises BenchError for runs that measured different things."""
    for name in ("kind", "ranks", "dtype", "device"):
        if getattr(before, name) != getattr(now, name):
            raise BenchError(
                f"The baseline has {name} {getattr(before, name)}, and this run {getattr(now, name)}. Compare equal "
                f"runs; --output FILE makes another baseline."
            )
    earlier = {case.work: before.summaries(case) for case in before.cases}
    changes = [
        _compare(case.work, peer, earlier[case.work][peer], summary)
        for case in now.cases
        for peer, summary in now.summaries(case).items()
        if peer in earlier.get(case.work, {})
    ]
    if not changes:
        raise BenchError("The baseline has none of the sizes or models of this run. Measure the same ones.")
    return changes


def failed(changes: Sequence[Change], percent: float) -> list[Change]:
    """Select the changes of hvdkit's own times that are slower by more than `percent`, and by more than noise."""
    own = (OURS, IN_BUCKET, AS_BACKEND)
    return [change for change in changes if change.slower and change.percent > percent and change.peer in own]


def _compare(work: str, peer: str, before: Summary, now: Summary) -> Change:
    disjoint = now.low_s > before.high_s or now.high_s < before.low_s
    return Change(work, peer, before.median_s, now.median_s, noise=not disjoint)
