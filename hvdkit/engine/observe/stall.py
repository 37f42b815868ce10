"""Operations that some ranks do not submit: which, who is missing, and what those ranks are doing."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

from hvdkit.config import Config
from hvdkit.engine.named.coordinator import Coordinator, Waiting
from hvdkit.engine.named.operation import label_of
from hvdkit.log import logger
from hvdkit.world import read_job

_LOOK_S = 0.2  # how often it is looked
_ANSWER_S = 1.0  # how long a rank is waited for that has been asked what it does
_FRAMES = 8


def main_thread_stack() -> str:
    """What this process's main thread is doing, the innermost calls last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else "unknown\n"


def tell_command() -> str:
    """What to type to see all ranks; "" for a job that hvdrun has not started."""
    job, host = read_job()
    return f"What all ranks are doing now is told by `hvdkit stacks {job}`, typed on {host}.\n" if job else ""


class Stalls:
    """Looks after the operations that wait, on the rank that knows about all of them.

    who: names a rank for messages. clock: in seconds.
    """

    def __init__(self, config: Config, who: Callable[[int], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._check_s, self._shutdown_s = config.stall_check_s, config.stall_shutdown_s
        self._who, self._clock = who, clock
        self._next_s = 0.0
        self._reported: dict[str, float] = {}  # operation -> how long it had waited when it was last told of
        self._asked_s: dict[int, float] = {}
        self._stacks: dict[int, str] = {}

    def hear(self, rank: int, stack: str) -> None:
        """A rank that was asked has answered what it does."""
        self._stacks[rank] = stack

    def look(self, coordinator: Coordinator, ask: Callable[[int], None]) -> None:
        """Ask missing ranks what they do, and tell of what has waited too long. ask: sends a rank the question."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + _LOOK_S
        waiting = coordinator.waiting(now)
        self._reported = {one.name: self._reported[one.name] for one in waiting if one.name in self._reported}
        if not waiting:
            self._asked_s.clear()
            self._stacks.clear()
        for one in waiting:
            over = self._shutdown_s > 0 and one.seconds >= self._shutdown_s
            if not (over or self._due(one)) or not self._answered(one, now, ask):
                continue
            if over:
                why = self._tell(one)
                coordinator.give_up(one.name, f"{why}It was given up after stall_shutdown_s={self._shutdown_s:g} s.")
            else:
                self._reported[one.name] = one.seconds
                logger.warning("%s", self._tell(one))

    def _due(self, one: Waiting) -> bool:
        return self._check_s > 0 and one.seconds - self._reported.get(one.name, 0.0) >= self._check_s

    def _answered(self, one: Waiting, now: float, ask: Callable[[int], None]) -> bool:
        """Have the missing ranks said what they do, or had time to?"""
        for rank in one.missing:
            if rank not in self._asked_s:
                self._asked_s[rank] = now
                ask(rank)
        late = all(now - self._asked_s[rank] > _ANSWER_S for rank in one.missing)
        return late or all(rank in self._stacks for rank in one.missing)

    def _tell(self, one: Waiting) -> str:
        lines = [
            f"{label_of(one.kind, one.name)} has been waiting for {one.seconds:.0f} s: it was submitted by "
            f"{', '.join(map(self._who, one.present))}, and not by {', '.join(map(self._who, one.missing))}. All ranks "
            f"must submit the same operations.\n"
        ]
        for rank in one.missing:
            stack = self._stacks.pop(rank, "it does not answer: its process hangs outside of Python, or is gone\n")
            self._asked_s.pop(rank, None)
            lines.append(f"What {self._who(rank)} is doing:\n{stack}")
        return "".join(lines) + tell_command()
