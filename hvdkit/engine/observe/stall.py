"""The stall report: operations that some ranks do not submit, with those ranks and their stacks."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from hvdkit.config import Config
from hvdkit.engine.named.coordinator import Coordinator, Waiting
from hvdkit.engine.named.operation import label_of
from hvdkit.log import logger
from hvdkit.world import read_job

_LOOK_S = 0.2  # interval of the checks
_ANSWER_S = 1.0  # how long a missing rank has to send its stack
_FRAMES = 8


def main_thread_stack() -> str:
    """Return the stack of this process's main thread, the innermost calls last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else "unknown\n"


def report_command() -> str:
    """Return a line with the command that shows all ranks' stacks, for a report about a job that goes on.

    The line is "" for a job that hvdrun has not started.
    """
    job, host = read_job()
    return f"To see what all ranks are doing now, run `hvdkit stacks {job}` on {host}.\n" if job else ""


def describe_stacks(ranks: Sequence[int], stacks: Mapping[int, str], who: Callable[[int], str]) -> str:
    """Describe the activity of ranks. stacks: of the ranks that have answered. who: names a rank."""
    silent = "It does not answer: its process has ended or hangs outside of Python.\n"
    return "".join(f"What {who(rank)} is doing:\n{stacks.get(rank, silent)}" for rank in ranks)


class Stalls:
    """Checks for operations that wait too long; used on rank 0, which has the coordinator.

    config: the stall settings. who: names a rank for messages. clock: returns seconds.
    """

    def __init__(self, config: Config, who: Callable[[int], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._check_s, self._shutdown_s = config.stall_check_s, config.stall_shutdown_s
        self._who, self._clock = who, clock
        self._next_s = 0.0
        self._reported: dict[str, float] = {}  # operation -> seconds that it had waited at its last report
        self._asked_s: dict[int, float] = {}
        self._stacks: dict[int, str] = {}

    def on_message(self, rank: int, stack: str) -> None:
        """Store the stack that a rank has sent."""
        self._stacks[rank] = stack

    def check(self, coordinator: Coordinator, ask: Callable[[int], None]) -> None:
        """Report or abort operations that wait too long, with the missing ranks' stacks.

        coordinator: of the group. ask: requests the stack of a rank.
        """
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + _LOOK_S
        waiting = coordinator.waiting(now)
        self._reported = {each.name: self._reported[each.name] for each in waiting if each.name in self._reported}
        if not waiting:
            self._asked_s.clear()
            self._stacks.clear()
        for wait in waiting:
            over = self._shutdown_s > 0 and wait.seconds >= self._shutdown_s
            if not (over or self._due(wait)) or not self._answered(wait, now, ask):
                continue
            if over:
                why = self._describe(wait)
                coordinator.give_up(wait.name, f"{why}It was aborted after stall_shutdown_s={self._shutdown_s:g} s.")
            else:
                self._reported[wait.name] = wait.seconds
                logger.warning("%s%s", self._describe(wait), report_command())

    def _due(self, wait: Waiting) -> bool:
        return self._check_s > 0 and wait.seconds - self._reported.get(wait.name, 0.0) >= self._check_s

    def _answered(self, wait: Waiting, now: float, ask: Callable[[int], None]) -> bool:
        """Request the missing ranks' stacks. Returns whether all have sent them, or had enough time."""
        for rank in wait.missing:
            if rank not in self._asked_s:
                self._asked_s[rank] = now
                ask(rank)
        late = all(now - self._asked_s[rank] > _ANSWER_S for rank in wait.missing)
        return late or all(rank in self._stacks for rank in wait.missing)

    def _describe(self, wait: Waiting) -> str:
        stacks = describe_stacks(wait.missing, self._stacks, self._who)
        for rank in wait.missing:
            self._stacks.pop(rank, None)
            self._asked_s.pop(rank, None)
        return (
            f"{label_of(wait.kind, wait.name)} has been waiting for {wait.seconds:.0f} s: it was submitted by "
            f"{', '.join(map(self._who, wait.present))}, and not by {', '.join(map(self._who, wait.missing))}. All "
            f"ranks must submit the same operations.\n{stacks}"
        )
