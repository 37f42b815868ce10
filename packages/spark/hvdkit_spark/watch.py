"""When a job of ranks is given up: decided from what Spark tells of its stage."""

from __future__ import annotations

from typing import Literal

#: Seconds that the other ranks have to report, too, when one has failed.
GRACE_S = 8.0

Verdict = Literal["failed", "late"]


class Watch:
    """Judges a job as time passes. start_timeout: seconds until all ranks run. began: by the same clock as `now`."""

    def __init__(self, ranks: int, start_timeout: float, began: float) -> None:
        self._ranks, self._start_timeout, self._began = ranks, start_timeout, began
        self._started = False
        self._failed: float | None = None

    def judge(self, now: float, active: int, failed: bool) -> Verdict | None:
        """Why the job is to be ended now; None if it is to go on.

        active: running tasks. failed: has a rank reported a failure?
        """
        if active >= self._ranks:
            self._started = True
        if failed:
            self._failed = now if self._failed is None else self._failed
            return "failed" if now - self._failed >= GRACE_S else None
        return "late" if not self._started and now - self._began >= self._start_timeout else None
