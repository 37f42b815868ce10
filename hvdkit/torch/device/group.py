"""A process group of torch among the ranks of a transport, and its order with the streams of a device.

On an accelerator no call here makes the host wait, except wait_for_stream() and close(): the backend orders its own
stream behind the caller's current stream when an operation begins, and join() orders the caller's behind the operation.
On the CPU an operation runs in threads of the backend, and join() waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from hvdkit.errors import HvdkitError, RankLostError, TransportError
from hvdkit.log import logger
from hvdkit.torch.device.accelerator import Accelerator
from hvdkit.torch.device.backend import Backend, end_operations, has_failed, make_backend, shut_down
from hvdkit.torch.device.calls import Call, connect_ranks
from hvdkit.torch.device.store import ExchangeStore
from hvdkit.transport.api import Transport
from hvdkit.transport.polling import Backoff, calls, check_wait, drives

#: An operation that a backend has begun: torch.distributed's Work.
Work = Any

_POLL_S = 0.0005
_SLICE = timedelta(milliseconds=100)  # of a wait of the host, between two checks of the ranks
_CLOSE_S = 10.0  # limit of the wait for the backend in close()
_LEAVE_S = 2.0  # the same in leave(): for data that other ranks have not received yet
_GRACE_S = 2.0  # after the loss of a rank, for data that it has sent before
_SLOW_S = 60.0  # duration of an operation before a warning
_EXPLAIN_S = 2.0  # until the loss of a rank is known, after a connection to it has failed


class TorchGroup:
    """torch's process group of the ranks of a transport, for tensors of one device each; all ranks make it together.

    transport: connects the ranks by host memory, and detects ranks that have ended.
    accelerator: this rank's device.
    backend: name of the backend, see choose_backend().
    where: this rank with its host and device, for messages.
    name: the owner of the operations, such as a plan, for messages.
    one_host: all ranks are on this host.
    timeout_s: limit of the time to connect, in seconds.
    Raises TransportError or RankLostError if the ranks cannot be connected.
    """

    def __init__(
        self,
        transport: Transport,
        accelerator: Accelerator,
        backend: str,
        where: str,
        name: str,
        *,
        one_host: bool,
        timeout_s: float,
    ) -> None:
        self.transport, self.accelerator, self.kind, self.where, self.name = (
            transport,
            accelerator,
            backend,
            where,
            name,
        )
        self.rank, self.size = transport.rank, transport.size
        self.order: Any = None  # begins the operations, if sums are in the order of the ranks
        #: Objects that keep the group for an owner. None if it was opened without them: it then has no end of use.
        self.users: weakref.WeakSet[Any] | None = None
        self._failure: HvdkitError | None = None
        self._failing = threading.Lock()
        self._ending: threading.Thread | None = None  # ends the operations
        self._closed = False
        #: Operations that may be in progress. An accelerator does them in order, so the last one stands for all.
        self._begun: dict[Work, None] = {}
        self._runs = self._finished_runs = self._warned_runs = 0
        self._pending, self._lost_s = (0, 0.0), 0.0  # seen by inspect(): operations and since when; a rank that is lost
        self.backend = Backend(backend, self._connect(one_host, timeout_s))

    def _connect(self, one_host: bool, timeout_s: float) -> Any:
        """Make the backend in a thread, because it cannot be interrupted while it waits for a rank that has ended."""
        self._store = store = ExchangeStore(self.transport)  # kept: a backend may call it later, from its own threads
        made: list[Any] = []
        problems: list[str] = []
        connected = threading.Event()
        device = self.accelerator.device

        def connect() -> None:
            try:
                with self.accelerator.streams.current():
                    made.append(make_backend(self.kind, store, self.rank, self.size, device, one_host=one_host))
                    if self.kind != "gloo":  # its constructor has connected the ranks
                        connect_ranks(Backend(self.kind, made[0]), device)
            except Exception as error:
                problems.append(str(error).partition("\n")[0] or type(error).__name__)
            finally:
                connected.set()

        threading.Thread(target=connect, name="hvdkit-connect", daemon=True).start()
        try:
            ends = store.serve(connected, problems, timeout_s)
        except BaseException:  # whatever ends it: the backend in the other thread has no one at its store any more
            store.close(idle=False)
            self._give_up(made)
            raise
        store.close()
        for rank, problem in enumerate(ends):
            if problem:
                self._give_up(made)
                raise TransportError(
                    f"The ranks could not be connected for {self.name} by {self.kind.upper()}: on rank {rank} {problem}"
                )
        return made[0]

    def begin(self, call: Call) -> Work:
        """Begin an operation behind the present work of the caller's current stream; all ranks in the same order.

        Raises RankLostError or TransportError if this or an earlier operation has failed. All operations in progress
        are then ended, and every later call raises the same error.
        """
        self.check()
        calls().begun += 1
        try:
            work = call.method(*call.arguments)
        except RuntimeError as error:
            raise self.fail(self._explain(call.name, error)) from error
        if self.accelerator.on_host:
            self._begun[work] = None
        else:
            self._begun = {work: None}
        self._runs += 1
        return work

    def join(self, work: Work, watch: Callable[[], None] | None = None) -> None:
        """Make later work of the caller's current stream wait for an operation; raises as begin() does.

        watch: called now and then while the host waits; may raise.
        """
        self.check()
        if self.accelerator.on_host:
            self._wait_on_host(work, watch)
            self._begun.pop(work, None)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.fail(self._explain("an operation", error)) from error

    def _wait_on_host(self, work: Work, watch: Callable[[], None] | None) -> None:
        """Wait until an operation has ended, in slices. Raises RankLostError if a rank has ended."""
        pause = Backoff(self.transport.check)
        try:
            while not work.is_completed():
                if drives():
                    pause.pause()
                    continue
                try:
                    work.wait(_SLICE)
                    return
                except RuntimeError:  # the slice has passed; or the operation has failed: join() raises its error
                    if work.is_completed():
                        return
                check_wait()
                self.check()
                self.transport.check()
                if watch is not None:
                    watch()
        except RankLostError as error:
            calls().uncertain = True
            raise self.fail(error) from error
        except BaseException as error:  # whatever ends it: the ranks may be at different operations
            calls().uncertain = True
            if isinstance(error, Exception):  # of watch() or check_wait(), which raise for ranks that do not come
                self.fail(TransportError(f"A wait for {self.name} was ended by {type(error).__name__}."))
            raise

    def reached(self, work: Work) -> bool:
        """Return, without waiting, whether an operation has ended; raises as begin() does."""
        if not work.is_completed():
            return False
        self.join(work)
        self._begun.pop(work, None)  # it holds its tensors
        return True

    def wait_for_stream(self, timeout_s: float = math.inf) -> None:
        """Wait for all operations so far, at most `timeout_s` seconds; raises as begin() does.

        The results are valid if it returns in time.
        """
        deadline = time.monotonic() + timeout_s
        for work in tuple(self._begun):
            while not self.reached(work) and time.monotonic() < deadline:
                self.check()
                time.sleep(_POLL_S)
        self._check_backend()
        self.check()

    def _check_backend(self) -> None:
        """Raise RankLostError or TransportError, and end the operations, if the backend has reported an error."""
        if self._failure is None and has_failed(self.backend):
            raise self.fail(self._explain("an operation", RuntimeError("it has reported an error of the network")))

    def check(self) -> None:
        """Raise the error with which the group has failed; its results are undefined from then on."""
        if self._failure is not None:
            raise self._failure

    @property
    def under_way(self) -> bool:
        """Return whether an operation is in progress; queries the device."""
        works = tuple(self._begun)
        return not self._closed and self._failure is None and not all(work.is_completed() for work in works)

    @property
    def runs(self) -> int:
        """The number of operations that were begun."""
        return self._runs

    @property
    def unused(self) -> bool:
        """Return whether its users are gone, and all their operations have ended; queries the device."""
        if self.users is None or self.users or self._failure is not None or self._closed:
            return False
        return not self.under_way and (self.order is None or self.order.idle)

    def inspect(self, groups: Sequence[TorchGroup] = ()) -> None:
        """Check for lost ranks while operations may be in progress; a separate thread calls this periodically.

        It queries the device only after a rank was lost, or when the operations are slow, because a query in another
        thread disturbs the capture of a graph. If a rank is lost, the operations are ended and their results are
        undefined, so that no wait for them hangs.
        groups: all groups of this process, for messages.
        """
        runs = self._runs
        if self._failure is not None or self._closed or runs == self._finished_runs:
            return
        try:
            self._check_backend()
            self._look_after_peers(runs, time.monotonic(), groups)
        except HvdkitError as error:
            if not self._closed:
                self.fail(error)

    def _look_after_peers(self, runs: int, now: float, groups: Sequence[TorchGroup]) -> None:
        if self._pending[0] != runs:
            self._pending = runs, now
        try:
            self.transport.check()
        except RankLostError:
            # A rank that has ended in order has sent its data, which may still be in flight.
            self._lost_s = self._lost_s or now
            if now - self._lost_s >= _GRACE_S:
                if self.under_way:
                    raise
                self._finished_runs, self._lost_s = runs, 0.0
            return
        if now - self._pending[1] > _SLOW_S and self._warned_runs != runs:
            self._warned_runs = runs
            if not self.accelerator.on_host:
                with self.accelerator.streams.current():
                    for work in tuple(self._begun):  # one that has failed is completed, and join() raises its error
                        self.reached(work)
            if self.under_way:
                others = [group for group in groups if group is not self and group.under_way]
                logger.warning("%s", describe_slow(self, others, now - self._pending[1]))

    def _explain(self, what: str, error: RuntimeError) -> HvdkitError:
        """Make the error of a call that has failed, with the rank that has ended; a backend names only a connection."""
        deadline = time.monotonic() + _EXPLAIN_S
        while time.monotonic() < deadline:
            try:
                self.transport.check()
            except RankLostError as lost:
                return lost
            if self._failure is not None:
                return self._failure
            time.sleep(0.01)
        first = str(error).partition("\n")[0]
        return TransportError(f"{self.kind.upper()} failed in {what} of {self.name} on {self.where}: {first}.")

    def fail(self, error: HvdkitError) -> HvdkitError:
        """End this rank's operations; later calls raise `error`, or an earlier error. Returns the error they raise."""
        with self._failing:
            if self._failure is None:
                kind = RankLostError if isinstance(error, RankLostError) else TransportError
                self._failure = kind(f"{error} {self._describe_end()}")
                self._give_up([self.backend.calls])
        return self._failure

    def _describe_end(self) -> str:
        if self.kind == "xccl":
            return f"XCCL cannot end its operations on {self.where}: what waits for the device may not return."
        return f"The operations of {self.kind.upper()} on {self.where} were ended."

    def _give_up(self, backends: Sequence[Any]) -> None:
        """End the operations of backends that are not used any more, and keep their destructors from waiting."""
        for backend in backends:
            keep_for_ever(backend)
            # An abort may wait for the whole device, and so for another group that must be aborted too.
            self._ending = self._in_thread("hvdkit-abort", end_operations, backend)

    def _in_thread(self, name: str, call: Callable[[Any], None], backend: Any) -> threading.Thread | None:
        """Start a call with a device's backend; none on the CPU, where Gloo's abort() does not end operations."""
        if self.accelerator.on_host:
            return None

        def run() -> None:
            with contextlib.suppress(RuntimeError), self.accelerator.streams.current():
                call(backend)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Free the connections; collective, unless a rank is lost; may be called twice."""
        if self._closed:
            return
        try:
            self.wait_for_stream()  # inspect() ends it if a rank is lost
            self.transport.check()
            self._closed = True
            self._shut_down()
        except HvdkitError as error:
            self._closed = True
            self.fail(error)
            if self._ending is not None:
                self._ending.join(_CLOSE_S)
        self._begun.clear()
        self.backend = Backend(self.kind, None)

    def leave(self) -> None:
        """Free the connections without the other ranks, at the end of the process."""
        backend = self.backend.calls
        if backend is not None and (self._failure is not None or self.under_way):
            keep_for_ever(backend)
        elif backend is not None:  # its destructor would abort, and warn
            thread = self._in_thread("hvdkit-shutdown", shut_down, backend)
            if thread is not None:
                thread.join(_LEAVE_S)
                if thread.is_alive():
                    keep_for_ever(backend)
        self._closed, self.backend = True, Backend(self.kind, None)

    def _shut_down(self) -> None:
        thread = self._in_thread("hvdkit-shutdown", shut_down, self.backend.calls)
        if thread is None:
            return
        thread.join(_CLOSE_S)
        if thread.is_alive():
            raise TransportError(f"{self.kind.upper()} on {self.where} did not end within {_CLOSE_S:g} s.")


def keep_for_ever(value: object) -> None:
    """Keep an object from its destructor, also at the end of the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def describe_slow(group: TorchGroup, others: Sequence[TorchGroup], seconds: float) -> str:
    """Return the warning for slow operations. others: groups with operations in progress on the same device."""
    beside = ", ".join(dict.fromkeys(other.name for other in others))
    order = (
        f" Those of {beside} are under way on this GPU too: where ranks have issued operations of several "
        "groups in different orders, they may wait for one another (docs/guides/gpus.md#order-of-operations)."
    )
    return (
        f"The operations of {group.name} on {group.where} have been under way for {seconds:.0f} s. The usual cause is "
        f"a rank that has not called what the others have.{order if beside else ''} `hvdkit stacks` shows where the "
        "ranks are."
    )
