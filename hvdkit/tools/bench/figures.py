"""What is made of times: medians, spreads, ratios and bandwidths."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")

OURS, IN_BUCKET, NO_COMMUNICATION = "hvdkit", "hvdkit, in bucket", "no communication"


@dataclass(frozen=True)
class Figures:
    """A peer's times of one work, over all rounds.

    median_s, low_s, high_s: the median, and the quartiles that half of the rounds lie between.
    ratio: of this peer's time to the base's, the median of the ratios within each round; 1 for the base itself.
    """

    median_s: float
    low_s: float
    high_s: float
    ratio: float


def summarise(times: Mapping[str, Sequence[float]], base: str) -> dict[str, Figures]:
    """The figures of every peer. times: seconds of each round, as many for all. base: the peer to compare with."""
    return {name: _summarise(each, times[base]) for name, each in times.items()}


def _summarise(times: Sequence[float], base: Sequence[float]) -> Figures:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return Figures(middle, low, high, statistics.median(one / own for one, own in zip(times, base, strict=True)))


def bus_factor(kind: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests has it: the share of the bytes that must leave a rank."""
    share = (ranks - 1) / ranks
    return {"allreduce": 2 * share, "broadcast": 1.0}.get(kind, share)


def show_bytes(nbytes: float) -> str:
    """Bytes in binary multiples: "4 KiB", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:g} {unit}"
        nbytes /= 1024
    return f"{nbytes:g} GiB"


def show_time(seconds: float) -> str:
    """Seconds in the unit that suits them, three digits: "4.12 us", "48.2 ms", "1.30 s"."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds)} s"


def _digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"
