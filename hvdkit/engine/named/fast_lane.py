"""Small operations that every rank waits for at once: each shows its part, and whoever sees all parts has the result.

A rank that does not see them soon announces the operation as well. Should all parts turn up after that, it takes the
announcement back, and waits to hear that it has been. Nobody has done it through announcements then: a rank announces
nothing before it has looked for the others' parts, and the last one to show its part has seen them all. The others may
be at the next operation meanwhile, even under the same name, so what a rank announces says where it last met them all.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from hvdkit.engine.named.announcement import Announcement
from hvdkit.engine.named.execution import Operation
from hvdkit.engine.named.shortcut import Shortcut, plan_shortcut, show, take
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.polling import Backoff
from hvdkit.transport.shared.lane import EQUAL, MISSING, Lane

if TYPE_CHECKING:
    from hvdkit.engine.named.engine import NamedEngine

_MOST = 1024  # announcements that are known to be for a lane, or not to be
_PATIENCE_S = 0.002  # how long the others' parts are looked for before an operation is announced
_LOOKS = 100  # about 50 us: the first of these do without giving the core away


class FastLane:
    """An engine's way of doing operations on a lane, if there is one.

    met: the position after the last one at which all ranks have met.
    """

    def __init__(self, engine: NamedEngine, lane: Lane | None) -> None:
        self.met = 0
        self._engine, self._lane = engine, lane
        self._free = threading.Lock()  # held by the thread that is at a position
        self._some_joined = False  # they show nothing
        self._from = 0  # positions before are lost: some rank has moved on
        self._shortcuts: dict[Announcement, Shortcut | None] = {}

    def do(self, operation: Operation) -> bool:
        """Do an operation; False if it is not for the lane, or not now. Raises what it has failed with."""
        shortcut = self._shortcut(operation.asked)
        if shortcut is None or not self._free.acquire(blocking=False):
            return False
        try:
            return self._do(operation, shortcut)
        finally:
            self._free.release()

    def heard(self, position: int, *, some_joined: bool) -> None:
        """An operation is done through announcements that has been shown at positions before this one only."""
        self._from = max(self._from, position)
        self._some_joined = some_joined

    def all_joined(self) -> None:
        """All ranks have joined: they are all free again."""
        self._some_joined = False

    def close(self) -> None:
        """Let go of the lane."""
        if self._lane is not None:
            self._lane.close()

    def _shortcut(self, asked: Announcement) -> Shortcut | None:
        if self._lane is None or self._some_joined:
            return None
        try:
            return self._shortcuts[asked]
        except KeyError:
            shortcut = plan_shortcut(asked, self._lane.limit, self._engine.transport.size)
            if len(self._shortcuts) < _MOST:
                self._shortcuts[asked] = shortcut
            return shortcut

    def _do(self, operation: Operation, shortcut: Shortcut) -> bool:
        lane, engine = self._lane, self._engine
        assert lane is not None
        lane.skip_to(self._from)
        if not show(lane, engine.transport.rank, operation, shortcut):
            return False
        try:
            if self._see(lane):
                self.met = lane.position + 1
                with engine.span_of(operation):
                    self._take(lane, operation, shortcut)
                engine.finish(operation.name)
                return True
            engine.announce(operation, lane.position + 1)
            try:
                if not self._wait_beside(operation, lane):
                    return True
            except HorovodInternalError:
                if lane.look() != EQUAL:  # else who has left has shown its part before
                    raise
            self._take(lane, operation, shortcut)
            return True
        finally:
            lane.leave()

    def _take(self, lane: Lane, operation: Operation, shortcut: Shortcut) -> None:
        """Make the result; an error is this rank's alone, since nobody waits for it."""
        try:
            take(lane, operation, shortcut, self._engine.transport.arithmetic)
        except Exception as error:
            self._engine.finish(operation.name, error)
            raise

    def _see(self, lane: Lane) -> bool:
        """Do all ranks show their part within the time that is worth it?"""
        until, looks = time.perf_counter() + _PATIENCE_S, 0
        while (seen := lane.look()) == MISSING and self._from <= lane.position:
            looks += 1
            if looks < _LOOKS:
                continue
            if time.perf_counter() > until:
                return lane.look() == EQUAL
            os.sched_yield()
        return seen == EQUAL

    def _wait_beside(self, operation: Operation, lane: Lane) -> bool:
        """Wait until the operation is done, then False; or all parts are there and it is not going to be, then True."""
        waiting = Backoff(self._engine.transport.check)
        while not operation.done:
            if lane.look() == EQUAL:
                self.met = lane.position + 1
                self._engine.take_back(operation)
                self._engine.wait(operation)
                return True
            if not self._engine.drive():
                waiting.pause()
        if operation.error is not None:
            raise operation.error
        return False
