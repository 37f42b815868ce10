"""A thread that writes one checkpoint at a time, and whose errors are raised in the training thread."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

from hvdkit.errors import CheckpointError
from hvdkit.log import logger


class Writer:
    """Runs jobs in a thread, one after another.

    A job's error is logged when it happens, and raised by the next start() or wait(). If there is neither, the process
    ends with exit code 1. An interpreter that ends waits for the job.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, job: Callable[[], object], what: str) -> None:
        """Begin a job when the one before has ended, whose CheckpointError this raises. what: the job, for messages."""
        self.wait()

        def run() -> None:
            try:
                job()
            except Exception as error:  # of whatever kind: it is raised in the training thread
                self._error = CheckpointError(f"{what} failed: {type(error).__name__}: {error}")
                self._error.__cause__ = error
                logger.error("%s", self._error)

        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=run, name="hvdkit-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written. Raises CheckpointError if that has failed, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self._at_exit)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _at_exit(self) -> None:
        """At the end of the interpreter, where an exception would not change the exit code."""
        try:
            self.wait()
        except CheckpointError:  # which has been logged
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)
