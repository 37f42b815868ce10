"""A device group: NCCL's communicator of ranks with a GPU each, its stream, and its order with a framework's streams.

run() and join() do not make the host wait; wait(), settle() and close() do. Work on a framework's stream before run()
is done before NCCL's work; work on it after join() is done after NCCL's work.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from hvdkit.errors import HvdkitError, RankLostError, TransportError
from hvdkit.log import logger
from hvdkit.transport.api import Transport
from hvdkit.transport.device import Event
from hvdkit.transport.gpu_driver import GpuDevice
from hvdkit.transport.nccl.communicator import Communicator
from hvdkit.transport.nccl.library import Library
from hvdkit.transport.small_collectives import broadcast_bytes

_POLL_S = 0.0005
_CLOSE_S = 10.0  # limit of the wait for the other ranks in close()
_GRACE_S = 2.0  # after the loss of a rank, for data that it has sent before
_SLOW_S = 60.0  # duration of an operation before a warning


#: Enqueues operations of a communicator on a stream.
Body = Callable[[Communicator, int], None]


class DeviceGroup:
    """NCCL's communicator among the ranks of a transport, with its stream; all ranks make it together.

    transport: connects the ranks by host memory, and detects ranks that have ended.
    where: this rank with its host and GPU, for messages.
    timeout_s: limit of the time to connect, in seconds.
    name: the owner of the operations, such as a plan, for messages.
    Raises NcclError, TransportError or RankLostError if the ranks cannot be connected.
    """

    def __init__(
        self,
        transport: Transport,
        device: GpuDevice,
        library: Library,
        where: str,
        timeout_s: float,
        name: str = "",
    ) -> None:
        self.transport, self.device, self.where, self.name = transport, device, where, name
        self.rank, self.size, self.version = transport.rank, transport.size, library.version
        self.library = library.name
        self._failure: HvdkitError | None = None
        self._lock = threading.RLock()  # keeps the work that run() enqueues on streams together
        self._last: Event | None = None
        self._runs = self._finished_runs = self._warned_runs = 0
        self._pending, self._lost_s = (0, 0.0), 0.0  # seen by inspect(): operations and since when; a rank that is lost
        broadcast = functools.partial(broadcast_bytes, transport, root=0)
        with device.current():
            self._communicator = Communicator(
                library, self.rank, self.size, broadcast, where, transport.check, timeout_s
            )
        self._stream = device.make_stream(high_priority=True)
        self._closed = False

    def run(self, body: Body, producer: int, ready: Event, done: Event) -> None:
        """Call `body` to enqueue operations after the present work of the stream `producer`.

        All ranks call run() in the same order.
        body: enqueues the operations.
        producer: the framework's stream that writes the sources.
        ready: event, recorded on `producer` before the operations.
        done: event, recorded after the operations.
        Raises RankLostError or TransportError if this or an earlier operation has failed. All operations in progress
        are then ended, and every later call raises the same error.
        """
        with self._ending_at_failure():
            ready.record(producer)
        self.enqueue(body, [ready], done)

    def enqueue(self, body: Body, ready: Iterable[Event], done: Event) -> None:
        """Do as run(), but after events that are recorded already."""
        self.check()
        with self._lock, self._ending_at_failure(), self.device.current():
            for event in ready:
                self.device.wait(self._stream, event)
            body(self._communicator, self._stream)
            done.record(self._stream)
            self._last = done
            self._runs += 1

    def join(self, consumer: int, done: Event) -> None:
        """Make later work on the stream `consumer` wait for `done`; raises as run() does."""
        self.check()
        with self._ending_at_failure():
            self.device.wait(consumer, done)

    def reached(self, done: Event) -> bool:
        """Return, without waiting, whether the device has reached the event `done`; raises as run() does."""
        with self._ending_at_failure():
            return done.done()

    def wait(self, done: Event, pause: Callable[[], object]) -> None:
        """Wait until the device reaches `done`, calling pause() meanwhile; raises as run() does."""
        while not self.reached(done):
            self.check()
            pause()
        self.check()

    def wait_for_stream(self, timeout_s: float = math.inf) -> None:
        """Wait for all operations so far, at most `timeout_s` seconds; raises as run() does.

        The results are valid if it returns in time.
        """
        deadline, last = time.monotonic() + timeout_s, self._last
        while last is not None and not self.reached(last) and time.monotonic() < deadline:
            self.check()
            time.sleep(_POLL_S)
        self.check()

    def check(self) -> None:
        """Raise the error with which the group has failed; its results are undefined from then on."""
        if self._failure is not None:
            raise self._failure

    @property
    def under_way(self) -> bool:
        """Return whether an operation is in progress; queries the device."""
        last = self._last
        return last is not None and not self._closed and self._failure is None and not last.done()

    def inspect(self, groups: Sequence[DeviceGroup] = ()) -> None:
        """Check for lost ranks while operations are in progress; a separate thread calls this periodically.

        If a rank is lost, the operations are ended and their results are undefined, so that no wait for them hangs.
        groups: all groups of this process, for messages.
        """
        runs, last = self._runs, self._last
        if self._failure is not None or self._closed or last is None or runs == self._finished_runs:
            return
        try:
            if last.done():
                self._finished_runs, self._lost_s = runs, 0.0
            else:
                self._look_after_peers(runs, time.monotonic(), groups)
        except HvdkitError as error:
            if not self._closed:
                self.fail(error)

    def _look_after_peers(self, runs: int, now: float, groups: Sequence[DeviceGroup]) -> None:
        try:
            self.transport.check()
        except RankLostError:
            # A rank that has ended in order has sent its data, which may still be in flight.
            self._lost_s = self._lost_s or now
            if now - self._lost_s >= _GRACE_S:
                raise
            return
        self._communicator.check()
        if self._pending[0] != runs:
            self._pending = runs, now
        elif now - self._pending[1] > _SLOW_S and self._warned_runs != runs:
            self._warned_runs = runs
            others = [one for one in groups if one is not self and one.device is self.device and one.under_way]
            logger.warning("%s", describe_slow(self, others, now - self._pending[1]))

    def fail(self, error: HvdkitError) -> HvdkitError:
        """End this rank's operations; later calls raise `error`, or an earlier error. Returns the error they raise."""
        kind = RankLostError if isinstance(error, RankLostError) else TransportError
        self._failure = self._failure or kind(f"{error} {self.library}'s operations on {self.where} were ended.")
        # NCCL's abort may wait for the whole GPU, and so for another communicator that must be aborted too.
        threading.Thread(target=self._abort, name="hvdkit-nccl-abort", daemon=True).start()
        return self._failure

    @contextlib.contextmanager
    def _ending_at_failure(self) -> Iterator[None]:
        """Return a context in which an error of NCCL or CUDA makes the group fail, unless it has failed before."""
        try:
            yield
        except TransportError as error:
            raise self.fail(error) from error

    def _abort(self) -> None:
        with contextlib.suppress(HvdkitError), self.device.current():
            self._communicator.abort()

    def close(self) -> None:
        """Free the communicator and the stream; collective, unless a rank is lost; may be called twice."""
        if self._closed:
            return
        try:
            self.wait_for_stream()  # inspect() ends it if a rank is lost
            self.transport.check()
            self._closed = True
            with self.device.current():
                self._communicator.close(_CLOSE_S)
        except HvdkitError:
            self._closed = True
            self._abort()
        with contextlib.suppress(HvdkitError):
            self.device.destroy_stream(self._stream)


def describe_slow(group: DeviceGroup, others: Sequence[DeviceGroup], seconds: float) -> str:
    """Return the warning for slow operations. others: groups with operations in progress on the same GPU."""
    beside = ", ".join(dict.fromkeys(other.name for other in others))
    order = (
        f" Those of {beside} are under way on this GPU too: where ranks have issued operations of several "
        "communicators in different orders, they may wait for one another (docs/guides/gpus.md#order-of-operations)."
    )
    return (
        f"{group.library}'s operations of {group.name} on {group.where} have been under way for {seconds:.0f} s. The "
        f"usual cause is a rank that has not called what the others have.{order if beside else ''} `hvdkit stacks` "
        "shows where the ranks are."
    )
