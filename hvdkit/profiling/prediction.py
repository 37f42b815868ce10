"""Predicts a step on a number of hosts, by a pure model of buckets that are reduced while backward computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist

from hvdkit.transport.between.select import ALGORITHMS, Link, cheapest


def ring_s(link: Link, hosts: int, nbytes: float) -> float:
    """Return the seconds of a ring allreduce, as in Horovod, for comparison; hvdkit has none."""
    rounds = 2 * (hosts - 1)
    return rounds * (link.latency_s + link.message_s + link.byte_s * nbytes / hosts)


#: The algorithms of a Cluster.
MODELS = {**ALGORITHMS, "ring": ring_s}


@dataclass(frozen=True)
class Work:
    """A training step of one rank; the same on every rank, and on any number of hosts.

    compute_s: seconds of the whole step without communication.
    backward_s: seconds at the end of compute_s in which gradients become ready, at a constant rate of bytes.
    buckets: bytes that each bucket sends, in the order in which the buckets become ready.
    jitter_s: standard deviation of compute_s from step to step; a step takes as long as the slowest rank's.
    """

    compute_s: float
    backward_s: float
    buckets: Sequence[float]
    jitter_s: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """The hosts and the network of the ranks.

    link: the link between any two hosts, shared by a host's ranks.
    ranks_per_host: number of ranks on each host.
    local_byte_s: seconds for each byte that the ranks of a host reduce among themselves.
    overlap: fraction, 0 to 1, of the communication that could overlap with backward and does.
    algorithm: one of MODELS, between hosts; "" for the fastest of hvdkit's at each size.
    start_s: seconds that every allreduce between hosts costs in addition, for any number of hosts.
    """

    link: Link
    ranks_per_host: int = 1
    local_byte_s: float = 0.0
    overlap: float = 1.0
    algorithm: str = ""
    start_s: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """A step on `hosts` hosts: step_s = compute_s + late_s + exposed_s.

    hosts: number of hosts.
    step_s: seconds of the step.
    compute_s: seconds without communication.
    late_s: seconds by which the slowest of all ranks is behind the average.
    communication_s: seconds of all buckets, one after another.
    exposed_s: seconds of communication that do not overlap with backward.
    efficiency: compute_s / step_s, the fraction of their throughput without communication that the ranks keep.
    """

    hosts: int
    step_s: float
    compute_s: float
    late_s: float
    communication_s: float
    exposed_s: float

    @property
    def efficiency(self) -> float:
        """Return compute_s / step_s; 1.0 for a step without compute and communication."""
        return self.compute_s / self.step_s if self.step_s else 1.0


def reduce_s(cluster: Cluster, hosts: int, nbytes: float) -> float:
    """Return the seconds of an allreduce of `nbytes` a rank: inside each host, then between hosts.

    Raises ValueError for less than one host.
    """
    if hosts < 1:
        raise ValueError(f"the number of hosts is {hosts}; it must be 1 or more")
    local = cluster.local_byte_s * nbytes if cluster.ranks_per_host > 1 else 0.0
    if hosts == 1:
        return local
    name = cluster.algorithm or cheapest(cluster.link, hosts, nbytes)
    return local + cluster.start_s + MODELS[name](cluster.link, hosts, nbytes)


def predict_step(work: Work, cluster: Cluster, hosts: int) -> Prediction:
    """Predict the step on `hosts` hosts. Raises ValueError for less than one host."""
    each = [reduce_s(cluster, hosts, nbytes) for nbytes in work.buckets]
    communication = sum(each)
    hidden = cluster.overlap * (communication - _tail_s(work, each))
    late = work.jitter_s * slowest_of(hosts * cluster.ranks_per_host)
    exposed = communication - hidden
    return Prediction(hosts, work.compute_s + late + exposed, work.compute_s, late, communication, exposed)


def predict_scaling(work: Work, cluster: Cluster, hosts: Sequence[int]) -> list[Prediction]:
    """Predict the step on each of these numbers of hosts, such as 1, 2, 4 and 8 times those of a profile."""
    return [predict_step(work, cluster, number) for number in hosts]


def fit_overlap(work: Work, cluster: Cluster, hosts: int, step_s: float) -> float:
    """Return the overlap, 0 to 1, with which the model best fits a measured step.

    It is 1.0 if no communication could overlap.
    work: the step of a rank.
    cluster: the hosts and the network; its `overlap` is ignored.
    hosts: number of hosts of the measured step.
    step_s: seconds of the measured step.
    """
    each = [reduce_s(cluster, hosts, nbytes) for nbytes in work.buckets]
    could = sum(each) - _tail_s(work, each)
    if could <= 0:
        return 1.0
    late = work.jitter_s * slowest_of(hosts * cluster.ranks_per_host)
    return min(1.0, max(0.0, (work.compute_s + late + sum(each) - step_s) / could))


def slowest_of(ranks: int) -> float:
    """Return the expected maximum of `ranks` standard normal numbers, in standard deviations (Blom, 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def _tail_s(work: Work, each: Sequence[float]) -> float:
    """Return the seconds from the end of compute to that of the last bucket, if buckets cross one by one when ready."""
    total = sum(work.buckets)
    end = 0.0
    for ready, seconds in zip(accumulate(work.buckets), each, strict=True):
        begun = work.compute_s - work.backward_s * (1 - ready / total if total else 0)
        end = max(end, begun) + seconds
    return max(0.0, end - work.compute_s)
