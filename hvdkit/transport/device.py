"""The interface of a device with streams and events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

#: A stream as its library names it: CUDA's handle as an integer, or an object of torch. It can be hashed.
Stream = Any


class Event(ABC):
    """A point in the work of a stream, as a CUDA event."""

    @abstractmethod
    def record(self, stream: Stream) -> None:
        """Record the present end of the work queued on `stream`."""

    @abstractmethod
    def done(self) -> bool:
        """Return, without waiting, whether the work up to the event is done; True if it was never recorded."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until the work up to the event is done."""

    @abstractmethod
    def elapsed_ms(self, earlier: Event) -> float:
        """Return the milliseconds from `earlier` to this event; both were made with timing and are done."""


class Device(ABC):
    """A device that holds buffers and orders the work on them in streams.

    index: number of the device among those that this process sees. where: name of the device, for messages.
    """

    index: int
    where: str

    @abstractmethod
    def make_stream(self, *, high_priority: bool = False) -> Stream:
        """Make a stream."""

    @abstractmethod
    def destroy_stream(self, stream: Stream) -> None:
        """Free a stream of make_stream(); work already queued on it is still done."""

    @abstractmethod
    def make_event(self, *, timing: bool = False) -> Event:
        """Make an event."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work on `stream` wait for `event`; the calling thread does not wait."""

    @abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """Return a context in which this device is the calling thread's current device."""
