"""A wait in a bucket, announced to the stall report: rank 0 then knows who waits, and so who is missing."""

from __future__ import annotations

import time

from hvdkit.engine.api import Engine
from hvdkit.engine.named.operation import Announcement, Operation

_WAIT = Announcement("gradients", ())


class Watch:
    """One rank's waits in the buckets of a plan.

    A wait of engine.notice_s is submitted as a named operation, and withdrawn when it ends. So it is reported, and
    given up, like any operation that some ranks have not submitted, and fails at once if one of those has left.

    plan: names it, the same on all ranks.
    """

    def __init__(self, engine: Engine, notice_s: float, plan: str) -> None:
        self._engine, self._notice_s, self._plan = engine, notice_s, plan
        self._name = ""
        self._began_s = 0.0
        self._operation: Operation | None = None

    def begin(self, number: int) -> None:
        """A wait begins, in the round of this number, which is the same on all ranks."""
        self._began_s, self._name = time.monotonic(), f"gradients of {self._plan}, reduction {number}"

    def look(self) -> None:
        """The wait goes on; called now and then. Raises HorovodInternalError if the operation failed."""
        if self._operation is None:
            if time.monotonic() - self._began_s > self._notice_s:
                self._operation = self._engine.submit(self._name, _WAIT, ())
        elif self._operation.error is not None:
            raise self._operation.error

    def end(self) -> None:
        """The wait has ended."""
        if self._operation is not None:
            self._operation = None
            self._engine.withdraw(self._name)
