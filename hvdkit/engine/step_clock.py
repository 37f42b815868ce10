"""Measures the seconds that this rank computes in each step."""

from __future__ import annotations

import time

from hvdkit.engine.gradient_hook import Seconds
from hvdkit.engine.strategy import Strategy


class HostClock:
    """Measures each step's time without the waits for other ranks, if gradients are reduced in host memory.

    strategy: of the optimizer; its statistics contain the waits.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.restart()

    def restart(self) -> None:
        """Restart the time of the step now."""
        self._began_s, self._waited_s = time.perf_counter(), self._strategy.statistics.waited_s

    def step(self) -> Seconds | None:
        """End a step and begin the next. Returns a function that returns the seconds; None if a GPU's stream waits."""
        seconds, waits, before = time.perf_counter() - self._began_s, self._strategy.statistics.waited_s, self._waited_s
        self.restart()
        if waits is None:
            return None
        own_s = seconds - (waits - (before or 0.0))
        return lambda: own_s
