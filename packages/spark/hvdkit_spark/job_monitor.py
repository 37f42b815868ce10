"""Decides from the status of its Spark stage when a job of ranks is to be aborted."""

from __future__ import annotations

from typing import Literal

#: Seconds that the other ranks have to report after one has failed.
GRACE_S = 8.0

Verdict = Literal["failed", "late"]


class JobMonitor:
    """Decides when to abort a job. start_timeout: seconds until all ranks run. began: by the same clock as `now`."""

    def __init__(self, ranks: int, start_timeout: float, began: float) -> None:
        self._ranks, self._start_timeout, self._began = ranks, start_timeout, began
        self._started = False
        self._failed: float | None = None

    def check(self, now: float, active: int, failed: bool) -> Verdict | None:
        """Return the reason to end the job now; None if it is to continue.

        active: number of running tasks. failed: has a rank reported a failure?
        """
        if active >= self._ranks:
            self._started = True
        if failed:
            self._failed = now if self._failed is None else self._failed
            return "failed" if now - self._failed >= GRACE_S else None
        return "late" if not self._started and now - self._began >= self._start_timeout else None
