"""The verdict: where the time of a step goes, what more hosts would do, and what to change first; in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.profiling.advice import Advice, advise
from hvdkit.profiling.network import Network, find_network
from hvdkit.profiling.recordings import RankRecording
from hvdkit.profiling.scaling import TIMES, Scaling, model_scaling
from hvdkit.profiling.shares import Shares, split_steps
from hvdkit.profiling.slow import Slow, find_slow
from hvdkit.profiling.steps import Steps, find_steps


@dataclass(frozen=True)
class Parts:
    """Seconds of a step, on average; they add up to it. See Shares."""

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
    """Of one rank. waited_for_s: how long the others waited for it in a step."""

    rank: int
    host: str
    parts: Parts
    waited_for_s: float


@dataclass(frozen=True)
class Predicted:
    """A step on so many hosts; `times` those of the job. efficiency: throughput over that many times today's."""

    times: int
    hosts: int
    step_s: float
    efficiency: float


@dataclass(frozen=True)
class Verdict:
    """What is said of a job.

    first, last: numbers of the steps. count: of those that were looked at. pauses: steps that took much longer than
    usual, and are left out of all other numbers. pauses_s: by how much.
    missing: ranks that recorded nothing. loaders: processes that load data, -1 where that was not seen.
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
    advice: tuple[Advice, ...]


@dataclass(frozen=True)
class Analysis:
    """A verdict and what it rests on, for drawings."""

    verdict: Verdict
    steps: Steps
    shares: Shares
    scaling: Scaling


def analyse(recordings: Sequence[RankRecording], network: Network | None = None) -> Analysis:
    """Judge what the ranks recorded. network: between hosts, to predict for; what is known of the job's if None.

    Raises ProfileError if there are no steps that all ranks took.
    """
    steps = find_steps(recordings)
    shares = split_steps(steps)
    found = find_network(steps, len({one.host for one in steps.ranks}))
    scaling = model_scaling(steps, shares, network, found)
    return Analysis(_judge(steps, shares, scaling), steps, shares, scaling)


def _judge(steps: Steps, shares: Shares, scaling: Scaling) -> Verdict:
    usual = shares.usual
    parts = _parts(shares, slice(None))
    slow = find_slow(steps, shares)
    each = shares.step.max(axis=0)
    pauses = each[~usual & (each > each[usual].max())]
    there = {one.rank for one in steps.ranks}
    missing = tuple(rank for rank in steps.plan.ranks if rank not in there)
    return Verdict(
        size=len(steps.plan.ranks),
        hosts=tuple(dict.fromkeys(one.host for one in steps.ranks)),
        transport=steps.ranks[0].transport,
        first=int(steps.numbers[usual][0]),
        last=int(steps.numbers[usual][-1]),
        count=int(usual.sum()),
        parts=parts,
        ranks=tuple(
            RankParts(one.rank, one.host, _parts(shares, at), float(shares.waited_for[at, usual].mean()))
            for at, one in enumerate(steps.ranks)
        ),
        slow=slow,
        pauses=len(pauses),
        pauses_s=float((pauses - each[usual].mean()).sum()),
        missing=missing,
        loaders=steps.loaders,
        buckets=steps.plan.nbytes,
        network=scaling.network,
        predicted=_predict(scaling),
        advice=advise(steps, shares, scaling, slow),
    )


def _parts(shares: Shares, rank: int | slice) -> Parts:
    usual = shares.usual
    return Parts(
        *(float(one[rank][..., usual].mean()) for one in (shares.compute, shares.loading, shares.late, shares.exposed))
    )


def _predict(scaling: Scaling) -> tuple[Predicted, ...]:
    now = scaling.step_s(scaling.hosts)
    found = []
    for times in TIMES:
        step_s = scaling.step_s(times * scaling.hosts)
        found.append(Predicted(times, times * scaling.hosts, step_s, now / step_s))
    return tuple(found)
