"""Writes one thing at a time in a thread of its own, and does not let an error be lost."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

from hvdkit.errors import CheckpointError
from hvdkit.log import logger


class Writer:
    """Carries out jobs in the background, one after another.

    A job's error is told to the logger when it happens, and raised by the next start() or wait(). If there is neither,
    the process does not end with 0. An interpreter that ends waits for the job.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, job: Callable[[], object], what: str) -> None:
        """Begin a job, after the one before it. what: it does, for its error. Raises CheckpointError of that one."""
        self.wait()

        def run() -> None:
            try:
                job()
            except Exception as error:  # of whatever kind, the training thread is to have it
                self._error = CheckpointError(f"{what} failed: {type(error).__name__}: {error}")
                self._error.__cause__ = error
                logger.error("%s", self._error)

        atexit.register(self._last_word)
        self._thread = threading.Thread(target=run, name="hvdkit-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written. Raises CheckpointError if that has failed, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self._last_word)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _last_word(self) -> None:
        """At the end of the interpreter, where raising would change nothing."""
        try:
            self.wait()
        except CheckpointError:  # which has been told
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)
