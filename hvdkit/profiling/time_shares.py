"""Splits a step's time on each rank into compute, loading, late ranks and exposed communication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdkit.profiling.recordings import Floats
from hvdkit.profiling.steps import Steps

_FIRST = 5  # steps that are left out if there are more than 20: they first touch memory and compile code
_PAUSE = 3.0  # times the median step: a longer step has for example an evaluation or a checkpoint


@dataclass(frozen=True)
class TimeShares:
    """The seconds of each step on each rank, (R, n): compute, loading, late and exposed add up to `step`.

    step: the whole step.
    compute: the rest of the step.
    loading: waiting for data.
    late: waiting for ranks that came later.
    exposed: communication that did not overlap with compute, with copies to and from buckets.
    waited_for: mean time that the other ranks waited for this rank.
    usual: (n,), False for pauses.
    """

    step: Floats
    compute: Floats
    loading: Floats
    late: Floats
    exposed: Floats
    waited_for: Floats
    usual: np.typing.NDArray[np.bool_]


def split_steps(steps: Steps) -> TimeShares:
    """Split the time of all steps.

    The last rank of a step is the rank whose last bucket is ready last. While it computes, the others wait for it, even
    if the network is busy meanwhile, because the step could not have ended before. While it waits itself, and after its
    last bucket is ready, all ranks wait for the network.
    """
    whole = steps.reduced - steps.waiting
    last = steps.ready[:, :, -1].argmax(axis=0)
    late = _overlap(steps, last)
    exposed = (whole - late + steps.handed - steps.filling + steps.taken - steps.reduced).sum(axis=2) + steps.extra
    others = max(1, len(steps.ranks) - 1)
    waits = late.sum(axis=2)
    waited_for = np.stack([np.where(last == rank, waits.sum(axis=0), 0.0) / others for rank in range(len(steps.ranks))])
    step = steps.seconds
    loading = np.minimum(steps.loading, np.maximum(step - waits - exposed, 0.0))
    return TimeShares(step, step - loading - waits - exposed, loading, waits, exposed, waited_for, _find_usual(step))


def _overlap(steps: Steps, last: np.typing.NDArray[np.intp]) -> Floats:
    """Return for each wait, (R, n, B), the time in which the step's last rank, (n,), computed."""
    overlap = np.zeros_like(steps.waiting)
    for at, rank in enumerate(last):
        own = np.stack([steps.waiting[rank, at], steps.reduced[rank, at]], axis=1)  # (B, 2), in the order of time
        until = float(steps.ready[rank, at, -1])
        overlap[:, at] = _work(steps.reduced[:, at], own, until) - _work(steps.waiting[:, at], own, until)
        overlap[rank, at] = 0.0
    return overlap


def _work(times: Floats, waits: Floats, until: float) -> Floats:
    """Return the compute time of a rank before each of `times`, minus a constant: outside `waits` and up to `until`."""
    before = np.minimum(times, until)
    waited = np.concatenate([[0.0], np.cumsum(waits[:, 1] - waits[:, 0])])
    result: Floats = before - np.interp(before, waits.ravel(), np.stack([waited[:-1], waited[1:]], axis=1).ravel())
    return result


def _find_usual(step: Floats) -> np.typing.NDArray[np.bool_]:
    each = step.max(axis=0)
    usual = each <= _PAUSE * np.median(each)
    if len(each) > 4 * _FIRST:
        usual[:_FIRST] = False
    result: np.typing.NDArray[np.bool_] = usual
    return result
