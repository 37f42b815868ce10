"""A run beside a saved one: what has got slower, or faster, by more than noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.errors import BenchError
from hvdkit.tools.bench.figures import IN_BUCKET, OURS, Figures
from hvdkit.tools.bench.report import Report


@dataclass(frozen=True)
class Change:
    """A peer's time of a work, then and now. noise: the runs' middle halves overlap, so that nothing can be said."""

    work: str
    peer: str
    then_s: float
    now_s: float
    noise: bool

    @property
    def percent(self) -> float:
        """How much longer it takes now; below 0 it is faster."""
        return 100 * (self.now_s / self.then_s - 1)

    @property
    def slower(self) -> bool:
        """Slower than noise explains?"""
        return not self.noise and self.now_s > self.then_s


def compare(then: Report, now: Report) -> list[Change]:
    """The change of every work and peer that both runs have.

    Raises BenchError for runs that measured different things.
    """
    for name in ("kind", "ranks", "dtype"):
        if getattr(then, name) != getattr(now, name):
            raise BenchError(
                f"The baseline is of {name} {getattr(then, name)}, and this run of {getattr(now, name)}. Compare runs "
                f"of the same; --save-baseline makes another."
            )
    before = {case.work: then.figures(case) for case in then.cases}
    changes = [
        _compare(case.work, peer, before[case.work][peer], figures)
        for case in now.cases
        for peer, figures in now.figures(case).items()
        if peer in before.get(case.work, {})
    ]
    if not changes:
        raise BenchError("The baseline has none of the sizes or models of this run. Measure the same ones.")
    return changes


def failed(changes: Sequence[Change], percent: float) -> list[Change]:
    """Those of hvdkit's own that have become slower by more than so many percent, and by more than noise."""
    own = (OURS, IN_BUCKET)
    return [change for change in changes if change.slower and change.percent > percent and change.peer in own]


def _compare(work: str, peer: str, then: Figures, now: Figures) -> Change:
    apart = now.low_s > then.high_s or now.high_s < then.low_s
    return Change(work, peer, then.median_s, now.median_s, noise=not apart)
