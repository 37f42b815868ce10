"""What a plan needs of the device whose memory its buckets are in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvdkit.engine.observe.device_clock import DeviceClock
from hvdkit.transport.device import Device


class Streams:
    """The streams on which the gradients of a round were written.

    A framework may compute gradients on several; what is then given to one of them, such as the copies into a bucket,
    has to begin after all of them. current_stream: that the calling thread gives work to.
    """

    def __init__(self, device: Device, current_stream: Callable[[], int]) -> None:
        self._device, self._current_stream = device, current_stream
        self._written: set[int] = set()

    def note(self) -> None:
        """A gradient was written on the current stream."""
        self._written.add(self._current_stream())

    def join(self) -> None:
        """Let the current stream wait for the others; the host does not wait."""
        if len(self._written) < 2:
            return
        current = self._current_stream()
        for stream in self._written - {current}:
            event = self._device.make_event()
            event.record(stream)
            self._device.wait(current, event)

    def clear(self) -> None:
        """A round begins."""
        self._written.clear()


@dataclass(frozen=True)
class OnDevice:
    """clock: of the stages of buckets. streams: of the gradients. check: raises what the device's work has failed with,
    with rank and host; nothing can be reduced there any more.
    """

    clock: DeviceClock
    streams: Streams
    check: Callable[[], None]
