"""The seconds that this rank computes in each step."""

from __future__ import annotations

import time

from hvdkit.engine.gradient_hook import Seconds
from hvdkit.engine.strategy import Strategy


class HostClock:
    """Takes the seconds of each step, less the waits for other ranks, where gradients go through the host's memory.

    strategy: of the optimizer; its statistics have the waits.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.restart()

    def restart(self) -> None:
        """The step begins only here."""
        self._began_s, self._waited_s = time.perf_counter(), self._strategy.statistics.waited_s

    def step(self) -> Seconds | None:
        """A step has ended, and the next begins. Returns what reads its seconds; None where a GPU's stream waits."""
        seconds, waits, before = time.perf_counter() - self._began_s, self._strategy.statistics.waited_s, self._waited_s
        self.restart()
        if waits is None:
            return None
        own_s = seconds - (waits - (before or 0.0))
        return lambda: own_s
