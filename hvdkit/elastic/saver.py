"""Commits that are kept on a disk as well: for the life after this one, should the job be lost as a whole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from hvdkit.checkpoint.agreement import Agreement
from hvdkit.checkpoint.preemption import Signals, end_saved
from hvdkit.elastic.state import State
from hvdkit.errors import CheckpointError
from hvdkit.log import logger


class Saver:
    """Saves the state beside the training at some of its commits, and when the job is told to end; all ranks make one.

    From its making on SIGTERM, SIGUSR1 and SIGUSR2, to any rank, end the training at a commit: saved, with code 75.

    directory: see State.save_to. every_s: seconds from one that is saved to the next, at least.
    """

    def __init__(self, state: State, directory: str, every_s: float) -> None:
        self._state, self._directory, self._every_s = state, directory, every_s
        self._signals = Signals()
        self._wait: Callable[[], None] = _nothing
        self._saved_s = time.monotonic()
        self._agreement = Agreement()
        state.committed = self._look

    def _look(self) -> None:
        """The state has been committed: is it to be saved? Collective."""
        if not self._agreement.is_due():
            return
        agreed = self._agreement.ask(self._signals.number, time.monotonic() - self._saved_s >= self._every_s)
        if agreed.signal:
            end_saved(agreed, self.save_now)
        if agreed.save:
            self._save()

    def _save(self) -> None:
        """A commit that cannot be saved is told, and training goes on: the next one may have more luck."""
        self._saved_s = time.monotonic()
        wait, self._wait = self._wait, _nothing
        with contextlib.suppress(CheckpointError):
            wait()  # which has told its error
        try:
            self._wait = self._state.start_saving(self._directory)
        except CheckpointError as error:  # on rank 0
            logger.error("%s", error)

    def save_now(self) -> None:
        """Save, and return when it is on the disk; collective. Raises CheckpointError, on rank 0, if it cannot be."""
        with contextlib.suppress(CheckpointError):
            self._wait()
        self._state.start_saving(self._directory)()

    def close(self, *, well: bool) -> None:
        """Signals are no longer heard. well: return when all is on the disk; CheckpointError if that has failed."""
        self._state.committed = None
        self._signals.close()
        if well:
            self._wait()


def _nothing() -> None:
    pass
