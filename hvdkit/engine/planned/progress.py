"""A thread that drives reductions, for ranks that have a core to spare."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

from hvdkit.errors import TransportError
from hvdkit.transport.buckets import Buckets
from hvdkit.transport.polling import Backoff


class ProgressThread:
    """Advances buckets while any is started and not reduced, and sleeps otherwise.

    It takes no lock but the buckets' own. A TransportError ends its turn only: the training thread meets the same error
    when it waits. owner: the thread ends when this object is collected.
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
        """A bucket has been started."""
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
        """Have the thread end, without a wait."""
        self._closing = True
        self._work.set()

    def close(self) -> None:
        """End the thread, and wait for that."""
        self._finalizer.detach()
        self.end_soon()
        self.thread.join()


_END_S = 2.0  # for all of them, on a busy machine
_running: weakref.WeakSet[ProgressThread] = weakref.WeakSet()


def end_progress() -> None:
    """Have these threads leave the transports: MPI may be ended next, and no thread may call it from then on."""
    running, deadline = list(_running), time.monotonic() + _END_S
    for progress in running:
        progress.end_soon()
    for progress in running:
        progress.thread.join(max(0.0, deadline - time.monotonic()))


def has_spare_core(cores: float, compute_threads: int) -> bool:
    """Has a rank a core for a progress thread, beside those that it computes with?

    cores: this rank's, see fair_share(). compute_threads: 0 for as many as there are cores.
    """
    return compute_threads > 0 and cores >= compute_threads + 1
