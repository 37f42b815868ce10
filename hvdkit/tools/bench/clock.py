"""What takes the times of calls: the host's clock, or events in the stream of a GPU."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any


class Clock(ABC):
    """Takes marks in the work of this rank, and the seconds between two of them."""

    @abstractmethod
    def mark(self) -> Any:
        """Mark the point that has been reached; does not wait."""

    @abstractmethod
    def seconds(self, first: Any, last: Any) -> float:
        """The seconds between two marks; waits until the work up to the last one is done."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all work so far is done."""


class HostClock(Clock):
    """See Clock: for calls that have done their work when they return."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def settle(self) -> None:
        """See Clock.settle."""


class EventClock(Clock):
    """See Clock: events in the current stream of the current GPU; the host's clock would show when work was enqueued.

    module: torch.cuda, or what has its `Event` and `synchronize`.
    """

    def __init__(self, module: ModuleType | Any) -> None:
        self._module = module

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def settle(self) -> None:
        self._module.synchronize()


HOST_CLOCK = HostClock()
