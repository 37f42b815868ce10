"""Medians, spreads, ratios and bandwidths of measured times, and how they are written."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """A peer's times of one work, over all rounds.

    median_s, low_s, high_s: the median, and the quartiles.
    ratio: this peer's time over the base's, the median of the ratios within each round; 1 for the base itself.
    """

    median_s: float
    low_s: float
    high_s: float
    ratio: float


def summarise(times: Mapping[str, Sequence[float]], base: str) -> dict[str, Summary]:
    """Summarise the times of every peer. times: seconds in each round. base: the peer that ratios refer to."""
    return {peer: _summarise(seconds, times[base]) for peer, seconds in times.items()}


def _summarise(times: Sequence[float], base: Sequence[float]) -> Summary:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    ratio = statistics.median(own / other for own, other in zip(times, base, strict=True))
    return Summary(middle, low, high, ratio)


def bus_factor(kind: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    share = (ranks - 1) / ranks
    return {"allreduce": 2 * share, "broadcast": 1.0}.get(kind, share)


def show_bytes(nbytes: float) -> str:
    """Write bytes in binary multiples: "4 KiB", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:g} {unit}"
        nbytes /= 1024
    return f"{nbytes:g} GiB"


def show_time(seconds: float) -> str:
    """Write seconds in a fitting unit with three digits: "4.12 us", "48.2 ms", "1.30 s"."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds)} s"


def _digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"
