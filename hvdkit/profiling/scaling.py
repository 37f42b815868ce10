"""How long the step would take on more hosts, or with other buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdkit.profiling.network import Network
from hvdkit.profiling.prediction import Cluster, Work, fit_overlap, predict_step
from hvdkit.profiling.shares import Shares
from hvdkit.profiling.steps import Steps

TIMES = (1, 2, 4, 8)

# How much of what could be hidden behind backward is, where only one host has been seen: with a thread for it, without.
_THREADED, _INLINE = 0.9, 0.5


@dataclass(frozen=True)
class Scaling:
    """A step, as it would be on more hosts: `model(hosts)`, with what the model leaves out added.

    hosts: that it ran on.
    """

    hosts: int
    network: Network
    work: Work
    cluster: Cluster
    rest_s: float

    def step_s(self, hosts: int, buckets: Sequence[float] = ()) -> float:
        """Seconds of a step on so many hosts; with other buckets, bytes of each, if given."""
        work = replace(self.work, buckets=buckets) if buckets else self.work
        return predict_step(work, self.cluster, hosts).step_s + self.rest_s

    def merged(self, times: int) -> list[float]:
        """Buckets so many times as large."""
        all_of_them = self.work.buckets
        return [sum(all_of_them[at : at + times]) for at in range(0, len(all_of_them), times)]

    def cut(self, times: int) -> list[float]:
        """Buckets so many times smaller."""
        return [nbytes / times for nbytes in self.work.buckets for _ in range(times)]


def model_scaling(steps: Steps, shares: Shares, network: Network | None, found: Network) -> Scaling:
    """Fit the model to the steps. network: to predict for; `found` is that of the job, and taken if it is None.

    On several hosts the overlap is the one seen. On one it is assumed, and what ranks of a host cost each other stays.
    """
    hosts = len({one.host for one in steps.ranks})
    usual = shares.usual
    step_s = float(shares.step[:, usual].mean())
    exposed_s = float(shares.exposed[:, usual].mean()) if hosts > 1 else 0.0
    backward = (steps.ready[:, usual, -1] - steps.filling[:, usual, 0]).mean(axis=1)
    stood = (steps.reduced - steps.waiting)[:, usual, :-1].sum(axis=2).mean(axis=1)
    work = Work(
        compute_s=step_s - exposed_s,
        backward_s=float(np.clip(backward - stood, 0, step_s - exposed_s).mean()),
        buckets=[float(nbytes) for nbytes in steps.plan.wire_bytes],
    )
    cluster = Cluster(found.link, overlap=_THREADED if steps.plan.threaded else _INLINE)
    rest_s = 0.0
    if hosts > 1:
        cluster = replace(cluster, overlap=fit_overlap(work, cluster, hosts, step_s))
        rest_s = step_s - predict_step(work, cluster, hosts).step_s
    if network is not None:
        cluster = replace(cluster, link=network.link)
    return Scaling(hosts, network or found, work, cluster, rest_s)
