"""Preemption: records signals that request the end of the job, and ends it with a checkpoint on the disk."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from hvdkit.checkpoint.agreement import Agreed
from hvdkit.engine import runtime as engine
from hvdkit.engine.job_objects import broadcast_object
from hvdkit.errors import CheckpointError, Preempted
from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.log import logger

#: SIGTERM comes from a scheduler or hvdrun; SIGUSR1 warns a job that its time is nearly up, as LSF's SIGUSR2 does.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Signal handlers that record signals until close(). number: of the last signal; 0 for none.

    A handler that the program had installed is called as well. Only the main thread can install handlers; in another
    thread, the constructor logs a warning and no signal is recorded.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "Checkpoints was not created in the main thread, so it cannot handle signals: SIGTERM and SIGUSR1 "
                "end this process at once, without a checkpoint."
            )
            return
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()


def end_saved(agreed: Agreed, save: Callable[[], None]) -> NoReturn:
    """Save and raise Preempted on all ranks; raise CheckpointError on all ranks if the save fails.

    agreed: the signal, and the rank that received it. save: saves, and returns when the checkpoint is on the disk;
    collective.
    """
    problem = ""
    try:
        save()
    except CheckpointError as error:  # on rank 0 only
        problem = str(error)
    problem = broadcast_object(problem, name="checkpoint")
    name = signal.Signals(agreed.signal).name
    if problem:
        raise CheckpointError(f"rank {agreed.rank} received {name}, but the checkpoint could not be saved: {problem}")
    if engine.runtime("a checkpoint").world.rank == 0:
        logger.warning(
            "rank %d received %s: the checkpoint is saved, and the job ends with exit code %d. Run the same command "
            "again to continue.",
            agreed.rank,
            name,
            TRY_AGAIN,
        )
    raise Preempted  # the handlers stay: some signals come twice
