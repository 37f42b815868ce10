"""The verdict on a recording, in numbers: shares of a step, stragglers, prediction for more hosts, advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.profiling.advice import Advice, advise
from hvdkit.profiling.choice import Strategies, compare_strategies, measure
from hvdkit.profiling.network import Network, find_network
from hvdkit.profiling.recordings import RankRecording
from hvdkit.profiling.scaling import TIMES, Scaling, model_scaling
from hvdkit.profiling.scaling_report import ScalingReport, report_scaling
from hvdkit.profiling.shares import Shares, split_steps
from hvdkit.profiling.slow import Slow, find_slow
from hvdkit.profiling.steps import Steps, find_steps


@dataclass(frozen=True)
class Parts:
    """The mean shares of a step in seconds, which add up to the step. See Shares."""

    compute_s: float
    loading_s: float
    late_s: float
    exposed_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.loading_s + self.late_s + self.exposed_s


@dataclass(frozen=True)
class RankParts:
    """The shares of one rank. waited_for_s: how long the others waited for it in a step."""

    rank: int
    host: str
    parts: Parts
    waited_for_s: float


@dataclass(frozen=True)
class Predicted:
    """A step on `hosts` hosts, `times` those of the job. efficiency: throughput over `times` the present one."""

    times: int
    hosts: int
    step_s: float
    efficiency: float


@dataclass(frozen=True)
class Verdict:
    """The numbers of `hvdkit profile`, as its --json prints them.

    first, last: numbers of the first and last step. count: of the steps that count. pauses: number of steps that took
    much longer than usual, and do not count. pauses_s: seconds beyond usual steps in all of them. missing: ranks
    without a recording. loaders: processes that load data, -1 if that is not known.
    """

    size: int
    hosts: tuple[str, ...]
    transport: str
    first: int
    last: int
    count: int
    parts: Parts
    ranks: tuple[RankParts, ...]
    slow: Slow | None
    pauses: int
    pauses_s: float
    missing: tuple[int, ...]
    loaders: int
    buckets: tuple[int, ...]
    network: Network
    predicted: tuple[Predicted, ...]
    scaling: ScalingReport
    advice: tuple[Advice, ...]
    strategies: Strategies


@dataclass(frozen=True)
class Analysis:
    """A verdict with the data that it is computed from, for drawings."""

    verdict: Verdict
    steps: Steps
    shares: Shares
    scaling: Scaling


def analyse(
    recordings: Sequence[RankRecording], network: Network | None = None, one_rank_s: float | None = None
) -> Analysis:
    """Compute the verdict on a recording. network: between hosts, to predict for; that of the job if None.

    one_rank_s: seconds of a step on one rank with the same batch a rank, to compare with; estimated if None.
    Raises ProfileError if there are no steps that all ranks took.
    """
    steps = find_steps(recordings)
    shares = split_steps(steps)
    own = find_network(steps, len({rank.host for rank in steps.ranks}))
    scaling = model_scaling(steps, shares, network, own)
    return Analysis(_judge(steps, shares, scaling, one_rank_s), steps, shares, scaling)


def _judge(steps: Steps, shares: Shares, scaling: Scaling, one_rank_s: float | None) -> Verdict:
    usual = shares.usual
    parts = _parts(shares, slice(None))
    slow = find_slow(steps, shares)
    each = shares.step.max(axis=0)
    pauses = each[~usual & (each > each[usual].max())]
    recorded = {rank.rank for rank in steps.ranks}
    missing = tuple(rank for rank in steps.plan.ranks if rank not in recorded)
    return Verdict(
        size=len(steps.plan.ranks),
        hosts=tuple(dict.fromkeys(rank.host for rank in steps.ranks)),
        transport=steps.ranks[0].transport,
        first=int(steps.numbers[usual][0]),
        last=int(steps.numbers[usual][-1]),
        count=int(usual.sum()),
        parts=parts,
        ranks=tuple(
            RankParts(rank.rank, rank.host, _parts(shares, at), float(shares.waited_for[at, usual].mean()))
            for at, rank in enumerate(steps.ranks)
        ),
        slow=slow,
        pauses=len(pauses),
        pauses_s=float((pauses - each[usual].mean()).sum()),
        missing=missing,
        loaders=steps.loaders,
        buckets=steps.plan.nbytes,
        network=scaling.network,
        predicted=_predict(scaling),
        scaling=report_scaling(scaling, len(steps.plan.ranks), parts.compute_s + parts.loading_s, one_rank_s),
        advice=advise(steps, shares, scaling, slow),
        strategies=compare_strategies(measure(steps, shares, scaling)),
    )


def _parts(shares: Shares, rank: int | slice) -> Parts:
    usual = shares.usual
    seconds = shares.compute, shares.loading, shares.late, shares.exposed
    return Parts(*(float(share[rank][..., usual].mean()) for share in seconds))


def _predict(scaling: Scaling) -> tuple[Predicted, ...]:
    now = scaling.step_s(scaling.hosts)
    steps = [(times, scaling.step_s(times * scaling.hosts)) for times in TIMES]
    return tuple(Predicted(times, times * scaling.hosts, step_s, now / step_s) for times, step_s in steps)
