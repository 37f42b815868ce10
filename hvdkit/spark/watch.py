"""When a job of ranks is given up: decided from what Spark tells of its stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Seconds that the other ranks have to report, too, when one has failed.
GRACE_S = 8.0
#: Seconds that Spark has to start a stage again that has lost a task, so that its tasks report.
REPEAT_S = 8.0

Verdict = Literal["failed", "lost", "late"]


@dataclass(frozen=True)
class Progress:
    """A stage as Spark tells of it. active: its running tasks. attempt: 0 unless Spark has started it again."""

    active: int
    attempt: int


class Watch:
    """Judges a job as time passes. start_timeout: seconds until all ranks run. began: by the same clock as `now`."""

    def __init__(self, ranks: int, start_timeout: float, began: float) -> None:
        self._ranks, self._start_timeout, self._began = ranks, start_timeout, began
        self._started = False
        self._since: dict[Verdict, float] = {}

    def judge(self, now: float, progress: Progress | None, failed: bool) -> Verdict | None:
        """Why the job is to be ended now; None if it is to go on.

        progress: None while Spark has no stage of this job. failed: has a rank reported a failure?
        """
        if progress is not None and progress.active >= self._ranks:
            self._started = True
        lost = progress is not None and progress.attempt > 0
        if lost and now - self._since.setdefault("lost", now) >= REPEAT_S:
            return "lost"
        if failed and now - self._since.setdefault("failed", now) >= GRACE_S:
            return "failed"
        if not (self._started or lost or failed) and now - self._began >= self._start_timeout:
            return "late"
        return None
