"""A device on which all is done when a call returns, in place of a GPU."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from hvdkit.transport.device import Device, Event


class HostEvent(Event):
    """See Event: what was asked for before it is done."""

    def __init__(self) -> None:
        self._recorded_s = 0.0

    def record(self, stream: int) -> None:
        self._recorded_s = time.perf_counter()

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        """See Event.synchronize."""

    def elapsed_ms(self, earlier: Event) -> float:
        assert isinstance(earlier, HostEvent)
        return 1000.0 * (self._recorded_s - earlier._recorded_s)


class HostDevice(Device):
    """See Device: the host's memory."""

    index = 0
    where = "host memory"

    def make_stream(self, *, high_priority: bool = False) -> int:
        return 0

    def destroy_stream(self, stream: int) -> None:
        """See Device.destroy_stream."""

    def make_event(self, *, timing: bool = False) -> HostEvent:
        return HostEvent()

    def wait(self, stream: int, event: Event) -> None:
        """See Device.wait."""

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()
