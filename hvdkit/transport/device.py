"""Streams and events of a device; on the host they are there too and do nothing, so that no caller has to ask which."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

#: The stream of a host device, where all is done when a call returns.
HOST_STREAM = 0


class Event(ABC):
    """A point in a stream's work."""

    @abstractmethod
    def record(self, stream: int) -> None:
        """Be the point that `stream` has been given work up to."""

    @abstractmethod
    def done(self) -> bool:
        """Has the work up to it been done? True for one that was never recorded. Does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Let the calling thread wait until the work up to it is done."""

    @abstractmethod
    def elapsed_ms(self, earlier: Event) -> float:
        """Milliseconds from `earlier` to this one; both were made with timing and are done."""


class Device(ABC):
    """Where buffers are, and what orders the work on them.

    kind: "cpu" or "cuda". index: of a GPU among those that this process sees; 0 for the host. where: for messages.
    """

    kind: str
    index: int
    where: str

    @abstractmethod
    def make_stream(self, *, high_priority: bool = False) -> int:
        """A new stream, as CUDA's handle of it."""

    @abstractmethod
    def destroy_stream(self, stream: int) -> None:
        """Free a stream of make_stream(); what it was given is still done."""

    @abstractmethod
    def make_event(self, *, timing: bool = False) -> Event:
        """A new event."""

    @abstractmethod
    def wait(self, stream: int, event: Event) -> None:
        """Let what `stream` is given from now on begin after `event`; the calling thread does not wait."""

    @abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """Within, the device is the calling thread's current one."""


class HostEvent(Event):
    """See Event: what was asked for before it is done."""

    def __init__(self) -> None:
        self._recorded_s = 0.0

    def record(self, stream: int) -> None:
        """See Event.record."""
        self._recorded_s = time.perf_counter()

    def done(self) -> bool:
        """See Event.done."""
        return True

    def synchronize(self) -> None:
        """See Event.synchronize."""

    def elapsed_ms(self, earlier: Event) -> float:
        """See Event.elapsed_ms."""
        assert isinstance(earlier, HostEvent)
        return 1000.0 * (self._recorded_s - earlier._recorded_s)


class HostDevice(Device):
    """See Device: the host's memory."""

    kind = "cpu"
    index = 0
    where = "host memory"

    def make_stream(self, *, high_priority: bool = False) -> int:
        """See Device.make_stream."""
        return HOST_STREAM

    def destroy_stream(self, stream: int) -> None:
        """See Device.destroy_stream."""

    def make_event(self, *, timing: bool = False) -> HostEvent:
        """See Device.make_event."""
        return HostEvent()

    def wait(self, stream: int, event: Event) -> None:
        """See Device.wait."""

    def current(self) -> AbstractContextManager[None]:
        """See Device.current."""
        return nullcontext()
