"""What the time of a step goes to, on each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdkit.profiling.recordings import Floats
from hvdkit.profiling.steps import Steps

_FIRST = 5  # steps that are left out where there are plenty: memory is touched and code is warmed up in them
_PAUSE = 3.0  # times the usual step: something else went on


@dataclass(frozen=True)
class Shares:
    """Seconds of each step on each rank, (R, n); they add up to `step`.

    loading: waiting for data. late: waiting for ranks that were not there yet. exposed: communication that nothing hid,
    copies to and from buckets among it. compute: all the rest. waited_for: how long the others waited for this rank, on
    average. usual: which steps are no pauses, (n,).
    """

    step: Floats
    compute: Floats
    loading: Floats
    late: Floats
    exposed: Floats
    waited_for: Floats
    usual: np.typing.NDArray[np.bool_]


def split_steps(steps: Steps) -> Shares:
    """Split all steps. A wait for a bucket is for the last rank until that has its part ready, and exposed after."""
    ready = steps.ready.max(axis=0)  # (n, B)
    last = steps.ready.argmax(axis=0)
    whole = steps.reduced - steps.waiting
    late = np.clip(np.minimum(steps.reduced, ready) - steps.waiting, 0.0, whole)
    exposed = (whole - late + steps.handed - steps.filling + steps.taken - steps.reduced).sum(axis=2) + steps.extra
    others = max(1, len(steps.ranks) - 1)
    waited_for = np.stack(
        [np.where(last == rank, late.sum(axis=0), 0.0).sum(axis=1) / others for rank in range(len(steps.ranks))]
    )
    step, waits = steps.seconds, late.sum(axis=2)
    loading = np.minimum(steps.loading, np.maximum(step - waits - exposed, 0.0))
    return Shares(step, step - loading - waits - exposed, loading, waits, exposed, waited_for, _find_usual(step))


def _find_usual(step: Floats) -> np.typing.NDArray[np.bool_]:
    each = step.max(axis=0)
    usual = each <= _PAUSE * np.median(each)
    if len(each) > 4 * _FIRST:
        usual[:_FIRST] = False
    found: np.typing.NDArray[np.bool_] = usual
    return found
