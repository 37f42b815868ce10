"""One rank's execution of operations, step by step, and what the ranks tell each other of a step that fails or hangs.

All ranks do the same steps in the same order, so a step has the same number everywhere. A rank on which one fails says
so to the first rank, with the collectives that it has begun in it. If the step fails on all ranks, after the same
collectives, they are still in step: each raises its error, and goes on. Else some rank waits for the failed one, or has
done without it. Whoever finds that out says so, and the first rank stops all of them.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from hvdkit.engine.named.step_books import Place
from hvdkit.errors import PlanMismatchError, SharedMemoryError, TransportError
from hvdkit.transport.polling import Calls, calls

_FRAMES = 8
_LOOKED_S = 0.5  # a wait is looked at every 0.1 s, see waiting.py
_LONGEST_TEXT = 1500  # so that MPI sends it at once

#: Of a failure: the ranks cannot be in step any more; they are, whatever they have begun.
OUT_OF_STEP, IN_STEP = -1, 2**62


class Steps:
    """What this rank does. Its methods are called with the engine's lock for messages held, but for begin() and look().

    send: sends a message to the first rank. who: names this rank. notice_s: after how long a step is reported.
    stop: called where the first rank stops all.
    """

    def __init__(self, send: Callable[[Any], None], who: str, notice_s: float, stop: Callable[[str], None]) -> None:
        self._send, self._who, self._notice_s, self._stop = send, who, notice_s, stop
        self._number = self._ended = 0  # of the step begun last, and of the last one that has ended
        self._label, self._began_s, self._looked_s = "", 0.0, 0.0
        self._thread = 0
        self._calls, self._before = Calls(), 0
        self._reported = self._failed = 0
        self._failing: tuple[int, int, str] | None = None  # of another rank: step, collectives begun, why
        self._alike: tuple[int, bool] | None = None
        self.apart = False  # has this rank said that it cannot be in step with one that has failed?

    @property
    def under_way(self) -> bool:
        """Is this rank in a step?"""
        return self._ended < self._number

    def begin(self, label: str) -> None:
        """This thread begins the next step. label: names it for messages."""
        self._label, self._thread, self._calls = label, threading.get_ident(), calls()
        self._calls.uncertain, self._before = False, self._calls.begun
        self._began_s = time.monotonic()
        self._number += 1

    def end(self) -> None:
        """The step has ended, with or without success."""
        self._ended = self._number
        if self._reported == self._number:
            self._send(("ended", self._number))
        if self._failing is not None:
            self._compare()

    def look(self) -> None:
        """The thread of the step waits for other ranks."""
        self._looked_s = time.monotonic()

    def report(self) -> None:
        """Tell the first rank of a step that takes long; called now and then."""
        if not self.under_way:
            return
        if self._failing is not None:
            self._compare()
        seconds = time.monotonic() - self._began_s
        if self._reported < self._number and seconds > self._notice_s:
            self._reported = self._number
            self._send(("slow", self._number, self._label, self._begun, seconds))

    @property
    def _begun(self) -> int:
        return self._calls.begun - self._before

    def fail(self, error: Exception) -> bool:
        """Tell the first rank that the step has failed here; False if there is no answer to wait for."""
        begun = self._begun
        if isinstance(error, PlanMismatchError):
            begun = IN_STEP  # raised by what all ranks have found out together
        elif self._calls.uncertain or (isinstance(error, TransportError) and not isinstance(error, SharedMemoryError)):
            begun = OUT_OF_STEP  # too little shared memory is found out together, but by the ranks of one host
        kind, text = type(error).__name__, str(error)[:_LONGEST_TEXT]
        why = f"{self._label} failed on {self._who} with {kind}: {text}"
        self._failed = self._number
        self._send(("failed", self._number, begun, kind, why))
        return begun != OUT_OF_STEP

    def alike(self) -> bool | None:
        """Has the failed step failed on all ranks, in step? Then, whether with the same error; None if not known."""
        if self._alike is not None and self._alike[0] == self._number:
            return self._alike[1]
        return None

    def hear(self, content: tuple[Any, ...]) -> None:
        """A message of the first rank."""
        what, *rest = content
        if what == "failing":
            self._failing = (rest[0], rest[1], rest[2])
            self._compare()
        elif what == "alike":
            self._alike = (rest[0], rest[1])
        elif what == "stop":
            self._stop(rest[0])
        elif what == "where":
            self._send(("there", self._place()))

    def _compare(self) -> None:
        """Has this rank come farther than one that has failed? Then it waits in vain, or has done without it."""
        assert self._failing is not None
        number, begun, why = self._failing
        if number == self._failed:
            self._failing = None
        elif self._ended >= number or (self._number == number and self._begun > begun):
            self._failing = None
            self.apart = True
            self._send(("apart", number, why))

    def _place(self) -> Place:
        waits = self.under_way and time.monotonic() - self._looked_s < _LOOKED_S
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None and self.under_way else ""
        return Place(self._ended, self._begun, waits, stack)
