"""Which strategy a job should use: the time of a step with each, predicted from numbers of a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.profiling.network import reduction_s
from hvdkit.profiling.prediction import reduce_s
from hvdkit.profiling.scaling import Scaling
from hvdkit.profiling.shares import Shares
from hvdkit.profiling.steps import Steps

SYNCHRONOUS = "synchronous"
_WORTH = 1.05  # times as fast: less is within what such a prediction is off by
_LOCAL_EVERY, _OUTER_EVERY = 8, 100
_STALENESS = 4
_AHEAD = 16  # steps, of BackupSteps


@dataclass(frozen=True)
class Measured:
    """A synchronous step of a job.

    own_s: of each rank, compute and loading without waits, on average. step_s: of the whole step. noise_s: by which the
    slowest rank of a step is behind the rank that is slowest on average. meeting_s: of reducing all gradients, or
    averaging all parameters, with nothing to hide behind. fp16_saves_s: of a step, if 16 bits are sent between hosts in
    place of 32; 0 where that changes nothing. server_s: in which one server's link takes a rank's gradients and returns
    the parameters; 0 inside a host. remote: how many ranks are on other hosts than a server.
    """

    own_s: Sequence[float]
    step_s: float
    noise_s: float = 0.0
    meeting_s: float = 0.0
    fp16_saves_s: float = 0.0
    server_s: float = 0.0
    remote: int = 0


@dataclass(frozen=True)
class Choice:
    """A strategy.

    step_s: predicted seconds for the samples of one synchronous step of all ranks. speedup: over that step. same: is
    the result that of one process with the whole batch, but for rounding? use: how to ask for it. trade: in
    words.
    """

    name: str
    step_s: float
    speedup: float
    same: bool
    use: str
    trade: str


@dataclass(frozen=True)
class Strategies:
    """All choices, synchronous first; synchronous is named where nothing is predicted to be 5 % faster.

    best: name of the fastest one with the result of one process. fastest: of any.
    """

    choices: tuple[Choice, ...]
    best: str
    fastest: str

    def named(self, name: str) -> Choice:
        """The choice of this name."""
        return next(one for one in self.choices if one.name == name)


def measure(steps: Steps, shares: Shares, scaling: Scaling) -> Measured:
    """The numbers of a recorded job; with another network than the job's, of a job on that.

    Between hosts communication is that of the model; inside of one it is measured.
    """
    usual, hosts = shares.usual, scaling.hosts
    own = (shares.compute + shares.loading)[:, usual].mean(axis=1)
    before = float(shares.step[:, usual].mean()) - float(shares.exposed[:, usual].mean())
    buckets, link = scaling.work.buckets, scaling.cluster.link
    step_s = scaling.step_s(hosts)
    noise_s = max(0.0, before - float(own.max()))
    if hosts == 1:
        return Measured(own.tolist(), step_s, noise_s, reduction_s(steps))
    halves = [nbytes / 2 for nbytes in buckets] if steps.plan.wire_bytes == steps.plan.nbytes else buckets
    first = steps.ranks[0].host
    return Measured(
        own_s=own.tolist(),
        step_s=step_s,
        noise_s=noise_s,
        meeting_s=math.fsum(reduce_s(scaling.cluster, hosts, nbytes) for nbytes in buckets),
        fp16_saves_s=max(0.0, step_s - scaling.step_s(hosts, halves)),
        server_s=2 * (link.latency_s + link.byte_s * math.fsum(steps.plan.nbytes)),
        remote=sum(rank.host != first for rank in steps.ranks),
    )


def balanced_s(own_s: Sequence[float]) -> float:
    """The time of ranks that all compute equally long, if their rows are in proportion to their speed.

    own_s: of each rank with equal rows. All of it counts as in proportion to rows.
    """
    return len(own_s) / math.fsum(1 / seconds for seconds in own_s)


def compare_strategies(measured: Measured) -> Strategies:
    """Predict a step with each strategy. Raises ValueError for a time of a rank that is not above 0.

    Local SGD: ranks meet every H steps, so they wait for the rank that is slowest over H steps, whose noise grows with
    the root of H only. Asynchronous: nobody waits, until the slowest rank's gradient would be older than the bound.
    """
    own, now = measured.own_s, measured.step_s
    if not own or min(own) <= 0 or now <= 0:
        raise ValueError(f"the times of ranks are {list(own)} and of a step {now}; all must be above 0")
    found = [
        (
            SYNCHRONOUS,
            now,
            True,
            "hvd.DistributedOptimizer",
            "the result of one process with the whole batch; every step waits for the slowest rank",
        ),
        (
            "fp16 compression",
            max(max(own), now - measured.fp16_saves_s),
            True,
            "compression=hvd.Compression.fp16",
            "gradients are rounded to 16 bits between hosts; usually no change of the loss",
        ),
        (
            "balanced rows",
            max(balanced_s(own), now - (max(own) - balanced_s(own))),
            True,
            "hvd.data.BalancedSampler, or in Keras hvd.BalancedDataset",
            "the same result; faster ranks need memory for more rows. PyTorch and Keras",
        ),
        (
            f"local SGD, every {_LOCAL_EVERY}",
            _meeting_every(measured, _LOCAL_EVERY),
            False,
            f"hvd.LocalSGD(optimizer, every={_LOCAL_EVERY})",
            "replicas differ between meetings; may need another learning rate, and loses accuracy with large `every`",
        ),
        (
            f"DiLoCo, every {_OUTER_EVERY}",
            _meeting_every(measured, _OUTER_EVERY),
            False,
            f"hvd.DiLoCo(optimizer, every={_OUTER_EVERY})",
            "least communication; an outer optimizer to tune, a copy of the parameters, and progress in few meetings",
        ),
        (
            f"asynchronous, staleness {_STALENESS}",
            _asynchronous(measured, _STALENESS),
            False,
            f"hvd.AsynchronousOptimizer(optimizer, staleness={_STALENESS})",
            "gradients of old parameters: a step is worth less, and results are not repeatable",
        ),
    ]
    if len(own) > 1:
        found.append(
            (
                "backup steps, drop 1",
                _backup(measured),
                False,
                "hvd.BackupSteps(optimizer, drop=1)",
                "the slowest rank's gradients of a step are dropped, so a step has fewer samples; all ranks stay equal",
            )
        )
    choices = tuple(Choice(name, step_s, now / step_s, same, use, trade) for name, step_s, same, use, trade in found)
    return Strategies(choices, _fastest([one for one in choices if one.same]), _fastest(choices))


def _fastest(choices: Sequence[Choice]) -> str:
    found = max(choices, key=lambda one: one.speedup)
    return found.name if found.speedup >= _WORTH else choices[0].name


def _meeting_every(measured: Measured, every: int) -> float:
    return max(measured.own_s) + measured.noise_s / math.sqrt(every) + measured.meeting_s / every


def _backup(measured: Measured) -> float:
    """Steps of the second slowest rank, as many more as have the samples of all ranks; one server's link has it all."""
    own = sorted(measured.own_s)
    step_s = max(own[-2] + measured.server_s, own[-1] / (_AHEAD + 1), measured.remote * measured.server_s / 2)
    return step_s * len(own) / (len(own) - 1)


def _asynchronous(measured: Measured, staleness: int) -> float:
    """Rates of ranks add up, but no rank takes more than staleness + 1 steps in one of the slowest rank's."""
    own = [seconds + measured.server_s for seconds in measured.own_s]
    limit = (staleness + 1) / max(own)
    rate = math.fsum(min(1 / seconds, limit) for seconds in own)
    return max(len(own) / rate, measured.remote * measured.server_s / 2)
