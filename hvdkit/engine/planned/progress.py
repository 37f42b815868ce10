"""A thread that drives reductions, for ranks that have a core to spare."""

from __future__ import annotations

import contextlib
import threading

from hvdkit.errors import TransportError
from hvdkit.transport.buckets import Buckets
from hvdkit.transport.polling import Backoff


class ProgressThread:
    """Advances buckets while there is something to do, and sleeps otherwise.

    An error is left to the training thread, which meets it too as soon as it waits.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._work = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hvdkit-progress", daemon=True)
        self._thread.start()

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

    def end(self) -> None:
        """Let the thread end, without waiting for it."""
        self._closing = True
        self._work.set()

    def close(self) -> None:
        """End the thread."""
        self.end()
        self._thread.join()


def wants_thread(progress: str, cores: float, compute_threads: int) -> bool:
    """Is a reduction driven by a thread of its own? By the setting, or if the rank has a core for it.

    progress: the setting. cores: this rank's, see fair_share(). compute_threads: 0 for as many as there are cores.
    """
    if progress != "auto":
        return progress == "thread"
    return compute_threads > 0 and cores >= compute_threads + 1
