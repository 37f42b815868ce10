"""Saves commits to a disk too, for a restart after all ranks were lost."""

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
    """Saves the state in a thread at some of its commits, and when the job must end; all ranks create it.

    From then on SIGTERM, SIGUSR1 or SIGUSR2 to any rank ends the training at a commit: saved, with exit code 75.

    state: the state to save. directory: see State.save_to. every_s: smallest number of seconds between two saves.
    """

    def __init__(self, state: State, directory: str, every_s: float) -> None:
        self._state, self._directory, self._every_s = state, directory, every_s
        self._signals = Signals()
        self._wait: Callable[[], None] = _nothing
        self._saved_s = time.monotonic()
        self._agreement = Agreement()
        state.committed = self._on_commit

    def _on_commit(self) -> None:
        """Save the commit if a save is due; collective."""
        if not self._agreement.is_due():
            return
        agreed = self._agreement.ask(self._signals.number, time.monotonic() - self._saved_s >= self._every_s)
        if agreed.signal:
            end_saved(agreed, self.save_now)
        if agreed.save:
            self._save()

    def _save(self) -> None:
        """Begin to save. An error is only logged, because a later commit may be saved."""
        self._saved_s = time.monotonic()
        wait, self._wait = self._wait, _nothing
        with contextlib.suppress(CheckpointError):
            wait()  # its error has been logged
        try:
            self._wait = self._state.start_saving(self._directory)
        except CheckpointError as error:  # on rank 0
            logger.error("%s", error)

    def save_now(self) -> None:
        """Save, and wait until it is on the disk; collective. Raises CheckpointError, on rank 0, if that fails."""
        with contextlib.suppress(CheckpointError):
            self._wait()
        self._state.start_saving(self._directory)()

    def close(self, *, well: bool) -> None:
        """Restore the signal handlers. well: wait until all is on the disk; raises CheckpointError if that failed."""
        self._state.committed = None
        self._signals.close()
        if well:
            self._wait()


def _nothing() -> None:
    pass
