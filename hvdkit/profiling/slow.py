"""Finds stragglers: the rank or host for which the others wait, the first such step, the time, and if data is slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit.profiling.recordings import Floats
from hvdkit.profiling.steps import Steps
from hvdkit.profiling.time_shares import TimeShares

_SHARE = 0.1  # of a step: a shorter wait is not reported
_LEAST = 20  # smallest number of steps
_MOST = 0.75  # smallest fraction of all waiting for late ranks, and of the steps since its start


@dataclass(frozen=True)
class Slow:
    """Slow ranks, for which the others wait.

    ranks: one rank, or all ranks of `host`.
    host: their host.
    since: number of the first such step; None for the first recorded step.
    part: fraction of all steps since then.
    step_s: mean seconds of a step since then.
    waited_s: mean seconds that each other rank waits in a step.
    times: the ranks' own time in a step (compute and data) over that of the others.
    loading_s: seconds in a step by which they wait longer for data than the others.
    """

    ranks: tuple[int, ...]
    host: str
    since: int | None
    part: float
    step_s: float
    waited_s: float
    times: float
    loading_s: float


def find_slow(steps: Steps, shares: TimeShares) -> Slow | None:
    """Return the rank, or all ranks of a host, that cause at least 75 % of the waiting; None if there is none."""
    usual = np.flatnonzero(shares.usual)
    total = shares.waited_for[:, usual].sum(axis=0)
    best: tuple[float, list[int], int] | None = None
    for members in _candidates(steps):
        series = shares.waited_for[members][:, usual].sum(axis=0)
        start = find_change(series)
        since = series[start:]
        waited = float(since.mean())
        steady = float((since > waited / 3).mean())
        step_s = float(shares.step[:, usual[start:]].mean())
        if len(since) < min(_LEAST, len(usual)) or waited < _SHARE * step_s:
            continue
        if steady < _MOST or since.sum() < _MOST * total[start:].sum():
            continue
        if best is None or since.sum() > 1.2 * best[0]:  # a whole host only if it is not just one of its ranks
            best = float(since.sum()), members, start
    if best is None:
        return None
    _, members, start = best
    then = usual[start:]
    others = [rank for rank in range(len(steps.ranks)) if rank not in members]
    own = shares.compute + shares.loading
    times = float(own[members][:, then].mean() / own[others][:, then].mean())
    loading = float(shares.loading[members][:, then].mean() - shares.loading[others][:, then].mean())
    return Slow(
        ranks=tuple(steps.ranks[rank].rank for rank in members),
        host=steps.ranks[members[0]].host,
        since=int(steps.numbers[usual[start]]) if start else None,
        part=len(then) / len(usual),
        step_s=float(shares.step[:, then].mean()),
        waited_s=float(shares.waited_for[members][:, then].sum(axis=0).mean()),
        times=times,
        loading_s=loading,
    )


def find_change(series: Sequence[float] | Floats) -> int:
    """Return the index from which a series is at least twice as large; 0 if none. A few outliers do not count."""
    values = np.asarray(series, np.float64)
    if len(values) < 20:
        return 0
    values = np.minimum(values, 3 * np.median(values[-len(values) // 4 :]))
    falls = np.cumsum(values - values.mean())
    at = int(falls[:-1].argmin()) + 1
    before, after = values[:at].mean(), values[at:].mean()
    return at if before < after / 2 and at >= 5 else 0


def _candidates(steps: Steps) -> Iterator[list[int]]:
    yield from ([rank] for rank in range(len(steps.ranks)))
    hosts = list(dict.fromkeys(rank.host for rank in steps.ranks))
    for host in hosts if len(hosts) > 1 else ():
        members = [at for at, rank in enumerate(steps.ranks) if rank.host == host]
        if len(members) > 1:
            yield members
