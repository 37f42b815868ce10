"""Signals that ask a process to end soon: they are kept in mind, for the training to look at."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from hvdkit.log import logger

#: SIGTERM is a scheduler's or hvdrun's; SIGUSR1 what jobs are warned with before their time is up, SIGUSR2 LSF's own.
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Hears signals from its making on until close(). number: the last one that came; 0 for none.

    A handler that the program had installed is called as well. Only the main thread may make one: elsewhere nothing is
    heard, which is told.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Checkpoints was not made in the main thread: SIGTERM and SIGUSR1 end this process at once.")
            return
        for number in _HEARD:
            self._before[number] = signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)

    def close(self) -> None:
        """Put back what was there before."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()
