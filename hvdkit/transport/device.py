"""The interface of a device: its streams, and events in their work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager


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

    index: of a GPU among those that this process sees. where: for messages.
    """

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
