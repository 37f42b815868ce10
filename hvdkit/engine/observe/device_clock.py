"""Times of a device's work on the host's clock: events in a stream, which are read when the device has passed them.

So training does not wait for the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hvdkit.errors import HvdkitError
from hvdkit.log import logger
from hvdkit.transport.device import Device, Event

_SETTLE_S = 10.0
_POLL_S = 0.001


class DeviceClock:
    """Marks points in the work of the stream that a framework gives work to, and tells when the device was there.

    The host waits for the device in set() alone. Before set() times are seconds since the first mark; from it on they
    are those of the host's clock, and the clocks of host and device are taken to run alike.
    Used by one thread at a time, but for read(), which may be called by another one.
    """

    def __init__(self, device: Device, current_stream: Callable[[], int]) -> None:
        self._device, self._current_stream = device, current_stream
        self._known: tuple[Event, float] | None = None
        #: How often the clock has been set.
        self.times_set = 0
        self._lock = threading.Lock()  # around the two of them
        self._free: list[Event] = []

    def set(self) -> None:
        """Find out what a point of the device is on the host's clock. The host waits for the stream."""
        event = self.mark()
        event.synchronize()
        with self._lock:
            self._known = event, time.monotonic()
            self.times_set += 1

    def mark(self) -> Event:
        """An event after what the stream has been given."""
        event = self._free.pop() if self._free else self._device.make_event(timing=True)
        event.record(self._current_stream())
        return event

    def read(self, marks: Sequence[Event], times_set: int) -> list[float] | None:
        """When the device was there, in seconds; takes the marks back. None if the clock was set since.

        marks: in the order of mark(), all done. times_set: of the clock then. Raises TransportError if the device has
        failed.
        """
        with self._lock:
            if times_set != self.times_set:
                return None
            known, known_s = self._known or (marks[0], 0.0)
            times = [known_s + event.elapsed_ms(known) / 1000.0 for event in marks]
            self._free += marks[:-1] if self._known is None else [known, *marks[:-1]]
            self._known = marks[-1], times[-1]  # near the next ones: milliseconds come as float32
        return times


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
