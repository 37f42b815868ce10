"""Reports speedup and efficiency against one rank: weak scaling (same batch on each rank) and strong (same in all)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvdkit.profiling.scaling import TIMES, Scaling

_WORTH = 1.05  # smallest gain, as a factor of the strong speedup, for which more ranks are useful
_POOR = 0.5  # efficiency


@dataclass(frozen=True)
class Scaled:
    """The scaling of a number of ranks.

    step_s: seconds of a step. speedup: samples a second, over those of one rank. efficiency: speedup over the number of
    ranks.
    """

    step_s: float
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class ScalingPoint:
    """The scaling of a number of ranks, weak and strong.

    ranks: number of ranks.
    hosts: number of hosts.
    weak: each rank has the same batch as in the job.
    strong: all ranks together have the same batch as all ranks of the job.
    """

    ranks: int
    hosts: int
    weak: Scaled
    strong: Scaled


@dataclass(frozen=True)
class ScalingReport:
    """A job compared with one rank.

    one_rank_s: seconds of a step on one rank, with the batch of a rank of the job. measured: one_rank_s was given; else
    it is the time in which the ranks of the job compute and wait for data. points: the job, as measured; then 2, 4 and
    8 times its hosts, predicted.
    """

    one_rank_s: float
    measured: bool
    points: tuple[ScalingPoint, ...]


def report_scaling(scaling: Scaling, ranks: int, own_s: float, one_rank_s: float | None = None) -> ScalingReport:
    """Compare a job of `ranks` ranks with one rank.

    scaling: the fitted model of the job.
    ranks: number of the job's ranks.
    own_s: seconds of a step in which a rank computes or waits for data; only these shrink with its batch.
    one_rank_s: see ScalingReport; None to take own_s.
    """
    base_s = own_s if one_rank_s is None else one_rank_s

    def scale(step_s: float, batches: int, times: int) -> Scaled:
        """Scale one step. batches: batches of one rank of the job in a step of all ranks."""
        speedup = batches * base_s / step_s
        return Scaled(step_s, speedup, speedup / (times * ranks))

    points = tuple(
        ScalingPoint(
            times * ranks,
            times * scaling.hosts,
            weak=scale(scaling.step_s(times * scaling.hosts), times * ranks, times),
            strong=scale(scaling.with_less_work(own_s, times).step_s(times * scaling.hosts), ranks, times),
        )
        for times in TIMES
    )
    return ScalingReport(base_s, one_rank_s is not None, points)


def describe_scaling(report: ScalingReport) -> str:
    """Describe the report as text with a table."""
    return "\n".join(_list_lines(report))


def _list_lines(report: ScalingReport) -> Iterator[str]:
    job, *more = report.points
    known = "measured" if report.measured else "estimated: the work of this job's ranks without communication"
    yield (
        f"Against one rank, whose step takes {1e3 * report.one_rank_s:.3g} ms ({known}), {job.ranks} ranks are "
        f"{job.weak.speedup:.2f} times as fast: an efficiency of {100 * job.weak.efficiency:.0f} %."
    )
    yield "  ranks  hosts   weak (same batch on each rank)   strong (same batch in all)"
    for point in report.points:
        weak, strong = (f"{one.speedup:8.2f} x {100 * one.efficiency:5.0f} %" for one in (point.weak, point.strong))
        known = "measured" if point is job else "predicted"
        yield f"  {point.ranks:5}  {point.hosts:5}   {weak:28}   {strong:25}   {known}"
    poor = next((point for point in more if point.weak.efficiency < _POOR), None)
    if job.weak.efficiency >= _POOR and poor is not None:
        yield f"Weak scaling: from {poor.ranks} ranks on, more than half of their throughput would be lost."
    useless = next(
        (at for at, point in enumerate(more) if point.strong.speedup < _WORTH * report.points[at].strong.speedup), None
    )
    if useless is not None:
        yield (
            f"Strong scaling: {more[useless].ranks} ranks would be hardly faster than {report.points[useless].ranks} "
            "with the same batch in all; give each rank more samples."
        )
