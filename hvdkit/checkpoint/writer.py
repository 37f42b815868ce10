"""A thread that writes one checkpoint at a time; its errors are raised in the training thread."""

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

    A job's error is logged at once, and raised by the next start() or wait(). If neither is called, the process ends
    with exit code 1. At exit, the interpreter waits for the job.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, job: Callable[[], object], what: str) -> None:
        """Start a job when the previous job has ended; raises the CheckpointError of that job.

        job: writes the checkpoint. what: description of the job, for messages.
        """
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
        """Wait until no job is running. Raises CheckpointError, once, if the job has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self._at_exit)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _at_exit(self) -> None:
        """Wait at exit, and exit with code 1 after an error: an exception there would not change the exit code."""
        try:
            self.wait()
        except CheckpointError:  # it has been logged
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)
