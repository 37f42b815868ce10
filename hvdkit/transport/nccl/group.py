"""The ranks of a transport with a GPU each: NCCL's communicator of them, a stream for its work, and who waits for whom.

The host waits for no stream here. What a framework's stream has been given before run() comes before NCCL's work; what
it is given after join() comes after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import numpy as np

from hvdkit.errors import HvdkitError, RankLostError, TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import as_buffer
from hvdkit.transport.cuda import CudaDevice
from hvdkit.transport.device import Event
from hvdkit.transport.nccl.communicator import Communicator
from hvdkit.transport.nccl.library import Library

#: NCCL takes calls for one GPU from one thread at a time, for different communicators too.
_launching = threading.RLock()
_POLL_S = 0.0005
_CLOSE_S = 10.0  # for the other ranks to close theirs


#: Enqueues operations of a communicator on a stream.
Body = Callable[[Communicator, int], None]


class DeviceGroup:
    """A communicator of NCCL among the ranks of a transport, made by all of them together, and its stream.

    transport: of the ranks, in host memory: by it they meet, and it knows of ranks that have ended. where: this rank
    with its host and GPU, for messages. timeout_s: for connecting.
    Raises NcclError, TransportError or RankLostError where the ranks cannot be connected.
    """

    def __init__(
        self, transport: Transport, device: CudaDevice, library: Library, where: str, timeout_s: float
    ) -> None:
        self.transport, self.device, self.where = transport, device, where
        self.rank, self.size = transport.rank, transport.size
        self._failure: HvdkitError | None = None
        self._last: Event | None = None
        with _launching, device.current():
            self._communicator = Communicator.connect(
                library, self.rank, self.size, self._broadcast, where, transport.check, timeout_s
            )
        self._stream = device.make_stream(high_priority=True)
        self._closed = False

    def _broadcast(self, identity: bytes) -> bytes:
        array = np.frombuffer(identity, np.uint8).copy()
        self.transport.broadcast(as_buffer(array), 0)
        return array.tobytes()

    def run(self, body: Body, producer: int, ready: Event, done: Event) -> None:
        """Let `body` enqueue operations after what the stream `producer` has been given; all ranks do so in one order.

        ready, done: events of the device, recorded before and after the operations.
        Raises RankLostError or TransportError if an earlier operation has failed, NcclError if NCCL fails.
        """
        ready.record(producer)
        self.enqueue(body, [ready], done)

    def enqueue(self, body: Body, ready: Iterable[Event], done: Event) -> None:
        """As run(), after events that have been recorded already."""
        self.check()
        with _launching, self.device.current():
            for event in ready:
                self.device.wait(self._stream, event)
            body(self._communicator, self._stream)
            done.record(self._stream)
            self._last = done

    def join(self, consumer: int, done: Event) -> None:
        """Let what the stream `consumer` is given from now on begin after `done`; raises as run() does."""
        self.check()
        self.device.wait(consumer, done)

    def wait(self, done: Event, pause: Callable[[], object]) -> None:
        """Return when `done` is reached, calling pause() meanwhile; raises as run() does."""
        while not done.done():
            self.check()
            pause()
        self.check()

    def settle(self) -> None:
        """Wait for all operations so far; raises as run() does. Their results are right if it returns."""
        if self._last is not None:
            self.wait(self._last, lambda: time.sleep(_POLL_S))

    def check(self) -> None:
        """Raise what the group has failed with: its results are of no use from then on."""
        if self._failure is not None:
            raise self._failure

    def inspect(self) -> None:
        """Look after ranks that have ended while operations are under way; called by a thread of its own now and then.

        A lost rank ends the operations, whose results are then undefined, so that nothing waits for them for ever.
        """
        last = self._last
        if self._failure is not None or self._closed or last is None or last.done():
            return
        try:
            self.transport.check()
            self._communicator.check()
        except HvdkitError as error:
            self.fail(error)

    def fail(self, error: HvdkitError) -> None:
        """End what is under way on this rank, and have later calls raise `error`."""
        if isinstance(error, RankLostError):
            failure: HvdkitError = RankLostError(f"{error} NCCL's operations on {self.where} were ended.")
        else:
            failure = TransportError(f"{error} NCCL's operations on {self.where} were ended.")
        self._failure = self._failure or failure
        self._communicator.abort()

    def close(self) -> None:
        """Give the communicator and the stream back; collective, unless a rank is lost. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            self.check()
            self.transport.check()
            with _launching, self.device.current():
                self._communicator.close(_CLOSE_S)
        except HvdkitError:
            self._communicator.abort()
        self.device.destroy_stream(self._stream)
