"""The device interface of a plan whose buckets are in device memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvdkit.engine.observe.device_clock import DeviceClock
from hvdkit.transport.device import Device, Stream


class Streams:
    """The streams on which the gradients of a round were written.

    A framework may compute gradients on several streams; work that is then enqueued on one of them, such as the copies
    into a bucket, must begin after all of them. current_stream: returns the current stream of the calling thread.
    """

    def __init__(self, device: Device, current_stream: Callable[[], Stream]) -> None:
        self._device, self._current_stream = device, current_stream
        self._written: set[Stream] = set()

    def note(self) -> None:
        """Record that a gradient was written on the current stream."""
        self._written.add(self._current_stream())

    def join(self) -> None:
        """Make the current stream wait for the others; the host does not wait."""
        if len(self._written) < 2:
            return
        current = self._current_stream()
        for stream in self._written - {current}:
            event = self._device.make_event()
            event.record(stream)
            self._device.wait(current, event)

    def clear(self) -> None:
        """Forget all streams, at the beginning of a round."""
        self._written.clear()


@dataclass(frozen=True)
class OnDevice:
    """The device of a plan.

    clock: times the stages of buckets. streams: on which gradients were written. check: raises the error of the
    device's work, with rank and host, if it has failed; the device can reduce nothing then. sums: Config.device_sums.
    """

    clock: DeviceClock
    streams: Streams
    check: Callable[[], None]
    sums: str = "library"
