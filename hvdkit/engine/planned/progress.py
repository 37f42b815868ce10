"""Progress of reductions in the background, by a thread on ranks with a spare core, and reports of waits in buckets.

A wait for a bucket is reported to rank 0, which thus knows the ranks that wait, and the ranks that are missing.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

from hvdkit.engine.named.api import Engine
from hvdkit.engine.named.operation import Operation, OperationRequest
from hvdkit.errors import HorovodInternalError, RanksDisagreeError, TransportError
from hvdkit.transport.buckets import Buckets
from hvdkit.transport.polling import Backoff


class ProgressThread:
    """Advances buckets while any is started and not reduced, and sleeps otherwise.

    It takes no lock except the buckets' own. After a TransportError it sleeps until the next bucket starts; the
    training thread gets the same error when it waits. owner: the thread ends when this object is garbage-collected.
    """

    def __init__(self, buckets: Buckets, owner: object) -> None:
        self._buckets = buckets
        self._work = threading.Event()
        self._closing = False
        self.thread = threading.Thread(target=self._run, name="hvdkit-progress", daemon=True)
        self.thread.start()
        self._finalizer = weakref.finalize(owner, self.end_soon)
        self._finalizer.atexit = False
        _running.add(self)

    def wake(self) -> None:
        """Wake the thread, because a bucket has been started."""
        self._work.set()

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            with contextlib.suppress(TransportError):
                self._drive()
            if self._closing:
                return

    def _drive(self) -> None:
        waiting = Backoff(lambda: None)
        while not self._closing and self._buckets.busy:
            if not self._buckets.advance():
                waiting.pause()

    def end_soon(self) -> None:
        """Make the thread end, without waiting for it."""
        self._closing = True
        self._work.set()

    def close(self) -> None:
        """End the thread, and wait for its end."""
        self._finalizer.detach()
        self.end_soon()
        self.thread.join()


_END_S = 2.0  # limit for the end of all threads; enough on a busy machine
_running: weakref.WeakSet[ProgressThread] = weakref.WeakSet()


def end_progress() -> None:
    """End all progress threads, because MPI may be finalized next, and no thread may call it from then on."""
    running, deadline = list(_running), time.monotonic() + _END_S
    for progress in running:
        progress.end_soon()
    for progress in running:
        progress.thread.join(max(0.0, deadline - time.monotonic()))


def has_spare_core(cores: float, compute_threads: int) -> bool:
    """Return whether a rank has a core for a progress thread, in addition to those that it computes on.

    cores: this rank's, see fair_share(). compute_threads: number of threads that compute; 0 for the number of cores.
    """
    return compute_threads > 0 and cores >= compute_threads + 1


_WAIT = OperationRequest("gradients", ())


class WaitReporter:
    """Reports one rank's waits in the buckets of a plan.

    A wait longer than engine.notice_s is submitted as a named operation, and withdrawn when it ends. So it is reported,
    and aborted, like any operation that some ranks have not submitted, and fails at once if one of those has left.

    engine: of the ranks that reduce. notice_s: see Engine. plan: name of the plan, the same on all ranks.
    """

    def __init__(self, engine: Engine, notice_s: float, plan: str) -> None:
        self._engine, self._notice_s, self._plan = engine, notice_s, plan
        self._name = ""
        self._began_s = 0.0
        self._operation: Operation | None = None

    def name(self, number: int) -> str:
        """Return the name of the operation that reports a wait in this round, the same on all ranks."""
        return f"gradients of {self._plan}, reduction {number}"

    def begin(self, number: int) -> None:
        """Take note that a wait begins. number: of the round, the same on all ranks."""
        self._began_s, self._name = time.monotonic(), self.name(number)

    def check(self) -> None:
        """Report the wait if it is long; called at intervals. Raises HorovodInternalError if the operation failed."""
        if self._operation is None:
            if time.monotonic() - self._began_s > self._notice_s:
                self._operation = self._engine.submit(self._name, _WAIT, ())
        elif self._operation.error is not None:
            raise self._operation.error

    def raise_disagreement(self) -> None:
        """Raise RanksDisagreeError if the wait is one: other ranks, which have it already, may have ended since."""
        with contextlib.suppress(HorovodInternalError):
            self._engine.drive()
        if self._operation is not None and isinstance(self._operation.error, RanksDisagreeError):
            raise self._operation.error

    def end(self) -> None:
        """Take note that the wait has ended."""
        if self._operation is not None:
            self._operation = None
            self._engine.withdraw(self._name)
