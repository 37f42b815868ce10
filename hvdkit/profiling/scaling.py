"""Predicts the step on more hosts or with other buckets, by the model of prediction.py fitted to recorded steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdkit.profiling.network import Network
from hvdkit.profiling.prediction import Cluster, Work, fit_overlap, predict_step
from hvdkit.profiling.steps import Steps
from hvdkit.profiling.time_shares import TimeShares

TIMES = (1, 2, 4, 8)

# The overlap that is assumed if only one host was recorded: with a progress thread, and without.
_THREADED, _INLINE = 0.9, 0.5


@dataclass(frozen=True)
class Scaling:
    """A fitted model of the step.

    hosts: number of the job's hosts.
    network: the network to predict for.
    work: the step of a rank.
    cluster: the hosts and the network for the model.
    rest_s: seconds of the measured step minus those of the model.
    """

    hosts: int
    network: Network
    work: Work
    cluster: Cluster
    rest_s: float

    def step_s(self, hosts: int, buckets: Sequence[float] = ()) -> float:
        """Return the seconds of a step on `hosts` hosts. buckets: bytes of each bucket; () for the job's buckets."""
        work = replace(self.work, buckets=buckets) if buckets else self.work
        return predict_step(work, self.cluster, hosts).step_s + self.rest_s

    def with_less_work(self, own_s: float, times: int) -> Scaling:
        """Return the model with a `times` smaller batch. own_s: seconds of compute_s that are proportional to it."""
        compute_s = self.work.compute_s - own_s + own_s / times
        return replace(self, work=replace(self.work, compute_s=compute_s, backward_s=self.work.backward_s / times))

    def merged(self, times: int) -> list[float]:
        """Return the bytes of buckets that are `times` times as large."""
        buckets = self.work.buckets
        return [sum(buckets[at : at + times]) for at in range(0, len(buckets), times)]

    def cut(self, times: int) -> list[float]:
        """Return the bytes of buckets that are `times` times smaller."""
        return [nbytes / times for nbytes in self.work.buckets for _ in range(times)]


def model_scaling(steps: Steps, shares: TimeShares, network: Network | None, own: Network) -> Scaling:
    """Fit the model to the steps.

    On several hosts the overlap is fitted; on one host it is assumed, and communication inside the host counts as
    compute.
    steps: the recorded steps.
    shares: of their time.
    network: the network to predict for; `own` if None.
    own: the job's network.
    """
    hosts = len({rank.host for rank in steps.ranks})
    usual = shares.usual
    step_s = float(shares.step[:, usual].mean())
    exposed_s = float(shares.exposed[:, usual].mean()) if hosts > 1 else 0.0
    backward = (steps.ready[:, usual, -1] - steps.filling[:, usual, 0]).mean(axis=1)
    waited = (steps.reduced - steps.waiting)[:, usual, :-1].sum(axis=2).mean(axis=1)
    work = Work(
        compute_s=step_s - exposed_s,
        backward_s=float(np.clip(backward - waited, 0, step_s - exposed_s).mean()),
        buckets=[float(nbytes) for nbytes in steps.plan.wire_bytes],
    )
    cluster = Cluster(own.link, overlap=_THREADED if steps.plan.threaded else _INLINE)
    rest_s = 0.0
    if hosts > 1:
        cluster = replace(cluster, overlap=fit_overlap(work, cluster, hosts, step_s))
        rest_s = step_s - predict_step(work, cluster, hosts).step_s
    if network is not None:
        cluster = replace(cluster, link=network.link)
    return Scaling(hosts, network or own, work, cluster, rest_s)
