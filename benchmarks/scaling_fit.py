"""Fit the cost model to measured allreduces, and see how well it tells those that it was not fitted to: pure functions.

Every formula of the model (hvdkit/transport/between/select.py) is a sum of its parameters, each times a number from
the algorithm, hosts and bytes. So the parameters are those with the least sum of relative errors, with none below 0: a
measurement that another process has spoilt counts no more than any other, where squares would let it pull.

The hosts are processes of this machine. Where they are more than its cores, each round also waits for a turn on one: a
parameter of its own, which is left out where the model is drawn for hosts that have cores of their own.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdkit.profiling.prediction import Cluster, reduce_s
from hvdkit.tools.bench.report import show_bytes
from hvdkit.transport.between.select import Link
from hvdkit.transport.buffer import Array

WITHIN = 0.15  # of what was measured: how far off a prediction may be


@dataclass(frozen=True)
class Point:
    """A measured allreduce. algorithm: of cost.ALGORITHMS."""

    algorithm: str
    hosts: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Check:
    """A measurement that was held out. how: what the model was fitted to instead."""

    what: str
    hosts: int
    how: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative to what was measured; above 0 where the prediction is too long."""
        return self.predicted_s / self.measured_s - 1

    @property
    def met(self) -> bool:
        """Is it within the aim?"""
        return abs(self.error) <= WITHIN


@dataclass(frozen=True)
class Fitted:
    """The model of this machine. turn_s: seconds until a rank has its turn, where hosts are more than `cores`."""

    cluster: Cluster
    turn_s: float
    cores: int

    def here(self, hosts: int) -> Cluster:
        """The cluster, where so many of its hosts share the cores."""
        link = self.cluster.link
        late = replace(link, latency_s=link.latency_s + self.turn_s * (hosts > self.cores))
        return replace(self.cluster, link=late)

    def predict(self, point: Point) -> float:
        """Seconds that the model gives for a point."""
        return reduce_s(replace(self.here(point.hosts), algorithm=point.algorithm), point.hosts, point.nbytes)


def _with(cores: int, latency: float, message: float, byte: float, start: float, turn: float) -> Fitted:
    return Fitted(Cluster(Link(latency, byte, message), start_s=start), turn, cores)


_PARAMETERS = 5
_TURNS = 30


def fit(points: Sequence[Point], cores: int) -> Fitted:
    """The parameters that come closest to these points. Raises ValueError for no points."""
    if not points:
        raise ValueError("no points to fit to")
    units = [_with(cores, *map(float, row)) for row in np.eye(_PARAMETERS)]
    parts = np.array([[unit.predict(one) / one.seconds for unit in units] for one in points])
    best, least = np.zeros(_PARAMETERS), np.inf
    subsets = (itertools.combinations(range(_PARAMETERS), count) for count in range(1, _PARAMETERS + 1))
    for chosen in itertools.chain.from_iterable(subsets):
        used = list(chosen)
        found = _least_errors(parts[:, used])
        error = float(np.abs(parts[:, used] @ found - 1).sum())
        if found.min() >= 0 and error < least * (1 - 1e-9):
            best, least = np.zeros(_PARAMETERS), error
            best[used] = found
    return _with(cores, *map(float, best))


def _least_errors(parts: Array) -> Array:
    """The x for which the sum of |parts @ x - 1| is least: squares, again and again, weighted by the errors before."""
    weights = np.ones(len(parts))
    for _ in range(_TURNS):
        found: Array = np.linalg.lstsq(parts * weights[:, None], weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(parts @ found - 1), 1e-6))
    return found


def hold_out(points: Sequence[Point], cores: int, group: Callable[[Point], Hashable], what: str) -> list[Check]:
    """Each point as told by a model that was fitted to the points of other groups. what: the group's name, in words."""
    checks = []
    for held in dict.fromkeys(map(group, points)):
        fitted = fit([one for one in points if group(one) != held], cores)
        for one in points:
            if group(one) == held:
                name = f"{one.algorithm}, {show_bytes(one.nbytes)}"
                how = f"without {what} {held}"
                checks.append(Check(name, one.hosts, how, one.seconds, fitted.predict(one)))
    return checks


def check_largest(points: Sequence[Point], cores: int) -> list[Check]:
    """The most hosts as told by a model that was fitted to fewer."""
    most = max(one.hosts for one in points)
    fitted = fit([one for one in points if one.hosts < most], cores)
    return [
        Check(
            f"{one.algorithm}, {show_bytes(one.nbytes)}",
            one.hosts,
            "fewer hosts",
            one.seconds,
            fitted.predict(one),
        )
        for one in points
        if one.hosts == most
    ]


def summarise(checks: Sequence[Check]) -> str:
    """One line: how many are within the aim, and how far off the usual and the worst one are."""
    errors = [abs(one.error) for one in checks]
    met = sum(one.met for one in checks)
    return (
        f"{met} of {len(checks)} within {WITHIN:.0%}; median error {statistics.median(errors):.0%}, "
        f"largest {max(errors):.0%}"
    )
