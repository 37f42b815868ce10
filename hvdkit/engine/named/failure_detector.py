"""Rank 0's record of all ranks' steps (step_runner.py): which have failed, and which take long.

Input and output go through `send` only. Invariants: a failed step is removed when all ranks that have not left have
reported it; once stopped, no other message about steps is sent. The caller holds the engine's lock for messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvdkit.config import Config
from hvdkit.engine.observe.stall import describe_stacks, report_command
from hvdkit.log import logger

_ANSWER_S = 1.0  # how long rank 0 waits for the ranks' replies about their progress
_MOST_STACKS = 8

_AFTERWARDS = "These ranks can do no more operations until all of them have called hvd.shutdown() and hvd.init()."


class StepProgress(NamedTuple):
    """The progress of a rank.

    ended: the number of its last step that has ended.
    begun: number of collectives that it has begun in the present step.
    waits: Does it wait for other ranks?
    stack: of the thread that executes the step; "" if no step is under way.
    """

    ended: int
    begun: int
    waits: bool
    stack: str


@dataclass
class _Slow:
    """A step that takes long.

    label: names the step for messages.
    since_s: time of its beginning, or of the last progress.
    reported: the ranks that have reported it and are still in it.
    reported_s: seconds after since_s at which it was last in a stall report; 0 before.
    asked_s: time of the query for the ranks' progress that is under way; 0 for none.
    places: the replies of the ranks.
    known: (steps ended, collectives begun) of each rank, as known before these replies.
    """

    label: str
    since_s: float
    reported: set[int] = field(default_factory=set)
    reported_s: float = 0.0
    asked_s: float = 0.0
    places: dict[int, StepProgress] = field(default_factory=dict)
    known: dict[int, tuple[int, int]] = field(default_factory=dict)


class FailureDetector:
    """The steps of the ranks of an engine.

    size: number of ranks.
    config: the stall settings.
    send: sends a rank a message.
    who: names a rank.
    """

    def __init__(
        self,
        size: int,
        config: Config,
        send: Callable[[int, Any], None],
        who: Callable[[int], str],
    ) -> None:
        self._size, self._send, self._who = size, send, who
        self._check_s, self._shutdown_s = config.stall_check_s, config.stall_shutdown_s
        self._failed: dict[int, dict[int, tuple[int, str, str]]] = {}  # step -> rank -> collectives, kind, why
        self._left: set[int] = set()
        self._slow: dict[int, _Slow] = {}
        self.stopped = False

    def on_message(self, rank: int, content: tuple[Any, ...]) -> None:
        """Handle a message from a rank."""
        what, *rest = content
        if what == "failed":
            self._fail(rank, rest[0], (rest[1], rest[2], rest[3]))
        elif what == "apart":
            self._stop(rest[1])
        elif what == "left":
            self._left.add(rank)
            for number in list(self._failed):
                self._resolve(number)
        elif what == "slow":
            number, label, begun, seconds = rest
            slow = self._slow.setdefault(number, _Slow(label, time.monotonic() - seconds))
            slow.reported.add(rank)
            slow.known[rank] = (number - 1, begun)
        elif what == "ended":
            ended = self._slow.get(rest[0])
            if ended is not None:
                ended.reported.discard(rank)
                if not ended.reported:
                    del self._slow[rest[0]]
        elif what == "there":
            for each in self._slow.values():
                each.places[rank] = rest[0]

    def _fail(self, rank: int, number: int, failure: tuple[int, str, str]) -> None:
        failed = self._failed.setdefault(number, {})
        first = not failed
        failed[rank] = failure
        begun, _, why = next(iter(failed.values()))
        if begun < 0 or any(other != begun for other, _, _ in failed.values()):
            self._stop(why)
        elif not self._resolve(number) and first:
            for peer in range(self._size):
                self._send(peer, ("failing", number, begun, why))

    def _resolve(self, number: int) -> bool:
        """Let the ranks go on if a step has failed on all ranks that have not left. Returns False otherwise."""
        failed = self._failed[number]
        if len(self._left | failed.keys()) < self._size:
            return False
        del self._failed[number]
        same = len(failed) == self._size and len({kind for _, kind, _ in failed.values()}) == 1
        for peer in failed:
            self._send(peer, ("alike", number, same))
        return True

    def _stop(self, why: str) -> None:
        if not self.stopped:
            self.stopped = True
            for peer in reversed(range(self._size)):
                self._send(peer, ("stop", f"{why.rstrip('.')}. {_AFTERWARDS}"))

    def check(self) -> None:
        """Report a step that takes too long, or end it; called at intervals."""
        if not self._slow or self.stopped:
            return
        number = min(self._slow)
        slow, now = self._slow[number], time.monotonic()
        seconds = now - slow.since_s
        over = self._shutdown_s > 0 and seconds >= self._shutdown_s
        if not over and not (self._check_s > 0 and seconds - slow.reported_s >= self._check_s):
            return
        if not slow.asked_s:
            slow.asked_s = now
            slow.places.clear()
            for peer in range(self._size):
                self._send(peer, ("where",))
            return
        if len(slow.places) < self._size and now - slow.asked_s < _ANSWER_S:
            return
        slow.asked_s = 0.0
        if self._progressed(slow):
            slow.since_s, slow.reported_s = now, 0.0
            return
        report = self._describe(number, slow, seconds)
        if over:
            self._stop(f"{report}It was aborted after stall_shutdown_s={self._shutdown_s:g} s")
        else:
            slow.reported_s = seconds
            logger.warning("%s%s", report, report_command())

    def _progressed(self, slow: _Slow) -> bool:
        """Has any rank ended a step or begun a collective since the query before?"""
        moved = False
        for rank, place in slow.places.items():
            now = (place.ended, place.begun)
            moved = moved or slow.known.get(rank, now) != now
            slow.known[rank] = now
        return moved

    def _describe(self, number: int, slow: _Slow, seconds: float) -> str:
        places = slow.places
        done = [rank for rank, place in places.items() if place.ended >= number]
        waits = [rank for rank, place in places.items() if place.ended < number and place.waits]
        missing = [rank for rank in range(self._size) if rank not in done and rank not in waits]
        parts = [f"{slow.label} has been running for {seconds:.0f} s."]
        if done:
            parts.append(f"Done: {self._list(done)}.")
        if waits:
            parts.append(f"Waiting for other ranks: {self._list(waits)}.")
        if missing:
            parts.append(f"Neither done nor waiting: {self._list(missing)}.")
        stacks = {rank: place.stack or "It has not begun this operation.\n" for rank, place in places.items()}
        return f"{' '.join(parts)}\n{describe_stacks((missing or waits)[:_MOST_STACKS], stacks, self._who)}"

    def _list(self, ranks: list[int]) -> str:
        return ", ".join(map(self._who, sorted(ranks)))
