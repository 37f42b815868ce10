"""Chooses the strategy for a job: predicts the time of a step with each strategy from the numbers of a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.profiling.network import reduction_s
from hvdkit.profiling.prediction import reduce_s
from hvdkit.profiling.scaling import Scaling
from hvdkit.profiling.steps import Steps
from hvdkit.profiling.time_shares import TimeShares

SYNCHRONOUS = "synchronous"
_WORTH = 1.05  # times as fast: a smaller gain is within the error of such a prediction
_LOCAL_EVERY, _OUTER_EVERY = 8, 100
_STALENESS = 4
_AHEAD = 16  # steps, of BackupSteps


@dataclass(frozen=True)
class Measured:
    """The times of a synchronous step of a job, in seconds.

    own_s: for each rank, the mean time of compute and loading, without waits.
    step_s: time of the whole step.
    noise_s: how much later the slowest rank of a step is than the rank that is slowest on average.
    meeting_s: time to reduce all gradients, or average all parameters, without overlap.
    fp16_saves_s: time that a step saves if 16 bits are sent between hosts instead of 32; 0 if that changes nothing.
    server_s: time in which a server's link receives a rank's gradients and returns the parameters; 0 inside a host.
    remote: number of ranks on other hosts than a server.
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
    """The prediction for a strategy.

    name: of the strategy.
    step_s: predicted seconds for the samples of one synchronous step of all ranks.
    speedup: over a synchronous step.
    same: the result is that of one process with the whole batch, except for rounding.
    use: the call or option for it.
    trade: its disadvantages, in words.
    """

    name: str
    step_s: float
    speedup: float
    same: bool
    use: str
    trade: str


@dataclass(frozen=True)
class Strategies:
    """All choices, synchronous first.

    best: name of the fastest strategy with the result of one process. fastest: name of the fastest of all strategies.
    Both are synchronous if no strategy is predicted to be 5 % faster.
    """

    choices: tuple[Choice, ...]
    best: str
    fastest: str

    def named(self, name: str) -> Choice:
        """Return the choice with this name."""
        return next(one for one in self.choices if one.name == name)


def measure(steps: Steps, shares: TimeShares, scaling: Scaling) -> Measured:
    """Compute the times of a recorded job, on the network of `scaling`.

    Communication between hosts is from the model; on a single host it is measured.
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
    """Return the time of every rank if their rows are proportional to their speed, so that all take the same time.

    own_s: time of each rank with equal rows; all of it counts as proportional to the rows.
    """
    return len(own_s) / math.fsum(1 / seconds for seconds in own_s)


def compare_strategies(measured: Measured) -> Strategies:
    """Predict a step with each strategy. Raises ValueError for a time of a rank that is not above 0.

    Local SGD: ranks synchronize every H steps, so they wait for the rank that is slowest over H steps; its noise grows
    only with the square root of H. Asynchronous: no rank waits, until the slowest rank's gradient would be older than
    the bound.
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
    """Predict backup steps: the second slowest rank's time, times n / (n - 1) for equal samples; at least the server's.

    All ranks' gradients and parameters go over one server's link.
    """
    own = sorted(measured.own_s)
    step_s = max(own[-2] + measured.server_s, own[-1] / (_AHEAD + 1), measured.remote * measured.server_s / 2)
    return step_s * len(own) / (len(own) - 1)


def _asynchronous(measured: Measured, staleness: int) -> float:
    """Add up the ranks' rates, each limited to staleness + 1 steps during a step of the slowest rank."""
    own = [seconds + measured.server_s for seconds in measured.own_s]
    limit = (staleness + 1) / max(own)
    rate = math.fsum(min(1 / seconds, limit) for seconds in own)
    return max(len(own) / rate, measured.remote * measured.server_s / 2)
