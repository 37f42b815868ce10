"""Hosts that were lost, and when they are tried again."""

from __future__ import annotations

import random
from collections.abc import Callable


class Blacklist:
    """Hosts that are left out for a while: each time about twice as long, as Horovod does it.

    cooldown: (shortest, longest) in seconds; None to leave them out for good. draw: a number from 0 up to 1.
    """

    def __init__(self, cooldown: tuple[float, float] | None = None, draw: Callable[[], float] = random.random) -> None:
        self._cooldown, self._draw = cooldown, draw
        self._count: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def add(self, host: str, now: float) -> float:
        """Leave a host out from now on; returns for how many seconds, infinity for good."""
        self._count[host] = count = self._count.get(host, 0) + 1
        wait = float("inf")
        if self._cooldown is not None:
            shortest, longest = self._cooldown
            wait = max(shortest, min(longest, shortest * 2 ** min(count, 40) + self._draw() * shortest))
        self._until[host] = now + wait
        return wait

    def allows(self, host: str, now: float) -> bool:
        """May ranks be started on it?"""
        return self._until.get(host, now) <= now

    @property
    def returns(self) -> bool:
        """Has it hosts that come back, or have come back?"""
        return self._cooldown is not None and bool(self._until)

    def is_waiting(self, now: float) -> bool:
        """Does a host come back some time?"""
        return any(now < until < float("inf") for until in self._until.values())
