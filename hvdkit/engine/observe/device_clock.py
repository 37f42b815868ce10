"""Times of a device's work on the host's clock: events in a stream, which are read after the device has reached them.

So training does not wait for the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hvdkit.errors import HvdkitError
from hvdkit.log import logger
from hvdkit.transport.device import Device, Event, Stream

_SETTLE_S = 10.0
_POLL_S = 0.001


class DeviceClock:
    """Marks points in the work of a framework's current stream, and returns the times when the device reached them.

    The host waits for the device only in set(). Before set(), times are seconds since the first mark; afterwards they
    are times of the host's clock, on the assumption that the clocks of host and device run at the same rate.
    One thread at a time may call it, except read(), which another thread may call.
    """

    def __init__(self, device: Device, current_stream: Callable[[], Stream]) -> None:
        self._device, self._current_stream = device, current_stream
        self._known: tuple[Event, float] | None = None
        #: Number of times that the clock has been set.
        self.times_set = 0
        self._lock = threading.Lock()  # guards _known and times_set
        self._free: list[Event] = []

    def set(self) -> None:
        """Synchronize with the host's clock. The host waits for the stream."""
        event = self.mark()
        event.synchronize()
        with self._lock:
            self._known = event, time.monotonic()
            self.times_set += 1

    def mark(self) -> Event:
        """Record an event behind the present work of the stream, and return it."""
        event = self._free.pop() if self._free else self._device.make_event(timing=True)
        event.record(self._current_stream())
        return event

    def read(self, marks: Sequence[Event], times_set: int) -> list[float] | None:
        """Return the times of marks, in seconds, and reuse the marks; None if the clock has been set since mark().

        marks: in the order of mark(), all done. times_set: its value at mark(). Raises TransportError if the device has
        failed.
        """
        with self._lock:
            if times_set != self.times_set:
                return None
            known, known_s = self._known or (marks[0], 0.0)
            times = [known_s + event.elapsed_ms(known) / 1000.0 for event in marks]
            self._free += marks[:-1] if self._known is None else [known, *marks[:-1]]
            self._known = marks[-1], times[-1]  # close to the next marks, because differences are float32 milliseconds
        return times


class Readings:
    """Functions to call when a device has reached a point, in the order of add(); any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[tuple[Event, Callable[[], None]]] = deque()

    def add(self, point: Event, read: Callable[[], None]) -> None:
        """Register `read` for a later flush(), which calls it once `point` is done."""
        with self._lock:
            self._waiting.append((point, read))

    def flush(self, timeout_s: float = 0.0) -> None:
        """Call the functions whose points are done.

        timeout_s: how long to wait for the device; functions that are still not due then are dropped, with a warning.
        With 0 they stay for the next call.
        If the device has failed, the functions are dropped with a warning; training gets the error by itself.
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

    def read_pending(self) -> None:
        """Wait for the device, and call all functions."""
        self.flush(_SETTLE_S)


READINGS = Readings()
