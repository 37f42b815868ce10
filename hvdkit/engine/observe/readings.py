"""What is read from a device once it has got there, so that training does not wait for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from hvdkit.errors import HvdkitError
from hvdkit.log import logger
from hvdkit.transport.device import Event

_SETTLE_S = 10.0
_POLL_S = 0.001


class Readings:
    """What is done when a device has reached a point, in the order in which it was asked for; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[tuple[Event, Callable[[], None]]] = deque()

    def add(self, point: Event, read: Callable[[], None]) -> None:
        """Have `read` called by a later flush(), once `point` is done."""
        with self._lock:
            self._waiting.append((point, read))

    def flush(self, timeout_s: float = 0.0) -> None:
        """Do what can be done. timeout_s: to wait for the device; what is not done then is forgotten.

        A device that has failed is training's own concern: here it costs the readings.
        """
        deadline = time.monotonic() + timeout_s
        try:
            with self._lock:
                while self._waiting:
                    point, read = self._waiting[0]
                    while not point.done():
                        if time.monotonic() >= deadline:
                            if timeout_s:
                                raise TimeoutError(f"the GPU did not get there within {timeout_s:g} s")
                            return
                        time.sleep(_POLL_S)
                    self._waiting.popleft()
                    read()
        except (HvdkitError, TimeoutError) as error:
            with self._lock:
                lost = len(self._waiting)
                self._waiting.clear()
            logger.warning("Profile, timeline and statistics lack the last %d steps of a GPU: %s", lost, error)

    def settle(self) -> None:
        """Wait for the device, and do all."""
        self.flush(_SETTLE_S)


READINGS = Readings()
