"""Computes the verdict on a recording: shares of a step, stragglers, prediction for more hosts, advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.profiling.advice import Advice, advise
from hvdkit.profiling.choice import Strategies, compare_strategies, measure
from hvdkit.profiling.network import Network, find_network
from hvdkit.profiling.recordings import RankRecording
from hvdkit.profiling.scaling import TIMES, Scaling, model_scaling
from hvdkit.profiling.scaling_report import ScalingReport, report_scaling
from hvdkit.profiling.slow import Slow, find_slow
from hvdkit.profiling.steps import Steps, find_steps
from hvdkit.profiling.time_shares import TimeShares, split_steps


@dataclass(frozen=True)
class Parts:
    """The mean shares of a step in seconds, which add up to the step; see TimeShares."""

    compute_s: float
    loading_s: float
    late_s: float
    exposed_s: float

    @property
    def step_s(self) -> float:
        """Return the seconds of the whole step."""
        return self.compute_s + self.loading_s + self.late_s + self.exposed_s


@dataclass(frozen=True)
class RankParts:
    """The mean shares of one rank.

    rank: its number.
    host: name of its host.
    parts: the shares.
    waited_for_s: mean seconds that each other rank waited for it in a step.
    """

    rank: int
    host: str
    parts: Parts
    waited_for_s: float


@dataclass(frozen=True)
class Predicted:
    """The prediction of a step on more hosts.

    times: multiple of the job's hosts.
    hosts: number of hosts.
    step_s: seconds of the step.
    efficiency: the throughput over `times` the job's throughput.
    """

    times: int
    hosts: int
    step_s: float
    efficiency: float


@dataclass(frozen=True)
class Verdict:
    """The numbers of `hvdkit profile`, as its --json prints them.

    size: number of ranks of the plan.
    hosts: names of the hosts.
    transport: name of the transport.
    first: number of the first step.
    last: number of the last step.
    count: number of steps that count.
    parts: mean shares of a step, of all ranks.
    ranks: mean shares of each rank.
    slow: the straggler; None for none.
    pauses: number of steps that took much longer than usual, and do not count.
    pauses_s: total seconds of these steps beyond usual steps.
    missing: ranks of the plan without a recording.
    loaders: number of processes that load data, -1 if unknown.
    buckets: bytes of each bucket.
    network: the network to predict for.
    predicted: the step on multiples of the job's hosts.
    scaling: speedup and efficiency against one rank.
    advice: changes that would shorten a step, largest saving first.
    strategies: predicted times with other strategies.
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
    """A verdict with the data from which it is computed, for drawings.

    verdict: the verdict.
    steps: the recorded steps.
    shares: the shares of their time.
    scaling: the fitted model.
    """

    verdict: Verdict
    steps: Steps
    shares: TimeShares
    scaling: Scaling


def analyse(
    recordings: Sequence[RankRecording], network: Network | None = None, one_rank_s: float | None = None
) -> Analysis:
    """Compute the verdict on a recording.

    recordings: of all ranks that sent one. network: the network between hosts to predict for; None for the job's.
    one_rank_s: seconds of a step on one rank with the same batch a rank, to compare with; None to estimate it.
    Raises ProfileError if there are no steps that all ranks took.
    """
    steps = find_steps(recordings)
    shares = split_steps(steps)
    own = find_network(steps, len({rank.host for rank in steps.ranks}))
    scaling = model_scaling(steps, shares, network, own)
    return Analysis(_judge(steps, shares, scaling, one_rank_s), steps, shares, scaling)


def _judge(steps: Steps, shares: TimeShares, scaling: Scaling, one_rank_s: float | None) -> Verdict:
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


def _parts(shares: TimeShares, rank: int | slice) -> Parts:
    usual = shares.usual
    seconds = shares.compute, shares.loading, shares.late, shares.exposed
    return Parts(*(float(share[rank][..., usual].mean()) for share in seconds))


def _predict(scaling: Scaling) -> tuple[Predicted, ...]:
    now = scaling.step_s(scaling.hosts)
    steps = [(times, scaling.step_s(times * scaling.hosts)) for times in TIMES]
    return tuple(Predicted(times, times * scaling.hosts, step_s, now / step_s) for times, step_s in steps)
