"""A wait in a bucket, told to the ranks' stall report: who waits is known there, and so who is missing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hvdkit.engine.named.announcement import Announcement
from hvdkit.engine.named.execution import Operation

if TYPE_CHECKING:
    from hvdkit.engine.api import Engine

_TOLD = Announcement("gradients", ())


class Watch:
    """Looks after one rank's waits in the buckets of a plan.

    A wait of a second is announced as an operation that is taken back when the wait ends. So it is reported, and given
    up, as any operation that some ranks have not submitted, and fails at once if one of those has left.

    what: the plan, in words that are the same on all ranks.
    """

    def __init__(self, engine: Engine, what: str) -> None:
        self._engine, self._what = engine, what
        self._name = ""
        self._began_s = 0.0
        self._told: Operation | None = None

    def begin(self, turn: int) -> None:
        """A wait begins. turn: number of the round, the same on all ranks."""
        self._began_s, self._name = time.monotonic(), f"gradients of {self._what}, reduction {turn}"

    def look(self) -> None:
        """The wait goes on; called now and then. Raises HorovodInternalError if there is no hope."""
        if self._told is None:
            if time.monotonic() - self._began_s > self._engine.notice_s:
                self._told = self._engine.submit(self._name, _TOLD, ())
        elif self._told.error is not None:
            raise self._told.error

    def end(self) -> None:
        """The wait has ended."""
        if self._told is not None:
            self._told = None
            self._engine.withdraw(self._name)
