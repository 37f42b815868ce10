"""The CPU as a device: a call has done its work when it returns, so streams order nothing."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from hvdkit.transport.device import Device, Event, Stream


class HostEvent(Event):
    """See Event. An event is done as soon as it is recorded."""

    def __init__(self) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Stream) -> None:
        self._recorded_s = time.perf_counter()

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        """See Event.synchronize. There is nothing to wait for."""

    def elapsed_ms(self, earlier: Event) -> float:
        assert isinstance(earlier, HostEvent)
        return 1000.0 * (self._recorded_s - earlier._recorded_s)


class HostDevice(Device):
    """See Device: the CPU."""

    index = 0
    where = "host memory"

    def make_stream(self, *, high_priority: bool = False) -> Stream:
        return 0

    def destroy_stream(self, stream: Stream) -> None:
        """See Device.destroy_stream. There is none."""

    def make_event(self, *, timing: bool = False) -> HostEvent:
        return HostEvent()

    def wait(self, stream: Stream, event: Event) -> None:
        """See Device.wait. The event is done."""

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()
