"""Waiting that yields: what a rank does while another one is not there yet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_YIELDS = 3000  # about 1 ms, by when a peer that runs on another core has arrived
_SLEEP_S = 50e-6
_CHECK_S = 0.1  # how often the peers are looked after


class Waiting:
    """Paces a polling loop and looks after the peers meanwhile; one object for one wait.

    check: called every 0.1 s; raises if the wait is hopeless. None where somebody else looks after the peers.
    """

    def __init__(self, check: Callable[[], None] | None = None) -> None:
        self._check = check
        self._turns = 0
        self._next_check = 0.0

    def pause(self) -> None:
        """Give the core to whoever needs it: yield at first, sleep later."""
        self._turns += 1
        if self._turns <= _YIELDS:
            os.sched_yield()
            return
        now = time.monotonic()
        if now >= self._next_check:
            if self._next_check and self._check is not None:
                self._check()
            self._next_check = now + _CHECK_S
        time.sleep(_SLEEP_S)
