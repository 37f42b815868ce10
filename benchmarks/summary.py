"""What the step-time benchmarks make of their times."""

from __future__ import annotations

import statistics


def summarise(times: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """Per peer, the median time in milliseconds and the median ratio to the step without communication."""
    base = times["no communication"]
    return {
        name: (statistics.median(each), statistics.median(one / none for one, none in zip(each, base, strict=True)))
        for name, each in times.items()
    }
