"""hvdkit's own series: step time, exposed communication, late ranks, bytes, samples per second, efficiency."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hvdkit.launcher_channel import Totals
from hvdkit.tracking.rows import OWN, Floats

#: Name without OWN -> meaning.
SERIES = {
    "step_ms": "milliseconds of a step, on rank 0's clock, evaluations and pauses between steps included",
    "samples_per_s": "samples of all ranks in a second",
    "exposed_ms": "of a step: the shortest wait for gradients of any rank; communication that was not hidden",
    "late_ms": "of a step: how much longer the other ranks wait, on average, than the one that waits least",
    "late_rank": "the rank that waits least, for which the others wait; says something where late_ms is not small",
    "reduced_mb": "megabytes of gradients that a rank has reduced in a step",
    "efficiency": "share of the step in which ranks do not wait for gradients; against one rank with the same batch",
}


@dataclass(frozen=True)
class Window:
    """A number of steps of this rank. seconds, samples: of all the steps. totals: their increments."""

    steps: int
    seconds: float
    samples: float
    totals: Totals


def pack_window(window: Window | None, rank: int, size: int) -> Floats:
    """Return an array (size + 1,) whose sum over the ranks contains the samples of all, and the wait of each."""
    packed = np.zeros(size + 1)
    if window is not None:
        packed[0], packed[1 + rank] = window.samples, window.totals.known_wait_s
    return packed


def own_series(window: Window | None, sums: Floats) -> dict[str, float]:
    """Return the series over a window on rank 0. sums: of the ranks' pack_window().

    Series of gradients are omitted if none were reduced or if a GPU's stream waited for them; samples if none were
    counted.
    """
    if window is None or window.steps <= 0 or window.seconds <= 0:
        return {}
    step_s = window.seconds / window.steps
    series = {"step_ms": 1e3 * step_s}
    if sums[0]:
        series["samples_per_s"] = float(sums[0]) / window.seconds
    if window.totals.rounds:
        series["reduced_mb"] = window.totals.nbytes / window.steps / 1e6
        waits_s = sums[1:] / window.steps
        if math.isfinite(float(waits_s.sum())):
            least, mean = float(waits_s.min()), float(waits_s.mean())
            series["exposed_ms"] = 1e3 * least
            if len(waits_s) > 1:
                series["late_ms"] = 1e3 * (mean - least) * len(waits_s) / (len(waits_s) - 1)
                series["late_rank"] = float(waits_s.argmin())
            series["efficiency"] = max(0.0, 1.0 - mean / step_s)
    return {OWN + name: series[name] for name in SERIES if name in series}
