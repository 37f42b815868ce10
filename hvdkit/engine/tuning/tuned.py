"""A planned reduction that begins by looking for the settings that suit it, between the steps of the training."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.engine.groups import MemberGroup
from hvdkit.engine.named.collective_step import collective_step
from hvdkit.engine.named.execution import Action
from hvdkit.engine.objects import allgather_object
from hvdkit.engine.planned.plan import Bucket
from hvdkit.engine.planned.reducer import BucketReducer
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.engine.tuning.axes import UNORDERED, shape_of
from hvdkit.engine.tuning.record import Record
from hvdkit.engine.tuning.search import Outcome, Search
from hvdkit.transport.api import Transport

STEPS_A_TRIAL = 10
_WARM_UP = 2  # of them, after a change: memory that is new
_FEWEST = 4  # steps that say something
_MOST_OF_FREE = 0.5  # shared memory that a trial may take


@dataclass(frozen=True)
class _Seen:
    """What a rank brings to the end of a trial. free_bytes: of shared memory. busy: another plan is searching."""

    seconds: tuple[float, ...]
    free_bytes: int
    busy: bool


class TunedReducer:
    """See BucketReducer, whose methods it has; every so many rounds its buckets may be others.

    The ranks decide by what all of them have measured, so they decide alike, at the end of a round that all have ended.
    Nothing is decided while a rank has joined. Of several plans one searches at a time.

    group: the ranks. name: of the plan. reopen: makes the plan with given settings, see BucketReducer; called by all
    ranks together. first: settings to begin with. axes: see Search. trials: at most. directory: of shared memory.
    record: on the rank that keeps one. found: told the outcome, on all ranks.
    """

    arrived: Callable[[int], None]
    started: Callable[[int], bool]

    def __init__(
        self,
        group: MemberGroup,
        name: str,
        reopen: Callable[[PlanSettings], BucketReducer],
        first: PlanSettings,
        axes: Mapping[str, Sequence[Any]],
        *,
        trials: int,
        directory: str,
        record: Record | None,
        found: Callable[[Outcome], None],
    ) -> None:
        self._engine, self._name, self._reopen, self._directory = group.engine, name, reopen, directory
        self._record, self._found = record, found
        self._take(reopen(first), first)
        self._shape = shape_of(self.buckets, group.transport.name, group.transport.local_ranks)
        self._search: Search | None = Search(first, axes, unordered=UNORDERED, most=trials, same=self._shape.same)
        self._seconds: list[float] = []
        self._round_ended_s = 0.0
        self.rounds = 0
        self._seen_of_other = -1
        self._engine.joining.contributions[f"tune.{name}"] = _weakly(weakref.ref(self))
        if record is not None:
            weakref.finalize(self, record.closed)  # also at the end of the process

    def _take(self, moving: BucketReducer, settings: PlanSettings) -> None:
        self._moving, self._settings = moving, settings
        self.arrived, self.started = moving.arrived, moving.started

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Those of now."""
        return self._moving.buckets

    @property
    def under_way(self) -> bool:
        """See BucketReducer."""
        return self._moving.under_way

    def finish(self) -> None:
        """See BucketReducer; ends a trial if its steps are over."""
        self._moving.finish()
        if self._search is None:
            return
        now = time.perf_counter()
        self._seconds.append(now - self._round_ended_s)
        self._round_ended_s = now
        self.rounds += 1
        # This number is the same on all ranks, also on those that had joined for a while.
        if self._engine.joining.rounds[self._name] % STEPS_A_TRIAL == 0:
            collective_step(self._engine, "tune", self._decide, name=self._name)
            self._seconds.clear()
            self._round_ended_s = time.perf_counter()

    def _decide(self, transport: Transport, joined: Sequence[int]) -> None:
        """End a trial, and begin the next one; collective."""
        if joined or self._search is None:
            return
        seen = allgather_object(transport, _Seen(tuple(self._seconds[_WARM_UP:]), self._free(), self._is_busy()))
        steps = min(len(one.seconds) for one in seen)
        if any(one.busy for one in seen):
            return
        _searching[0] = weakref.ref(self)
        if steps < _FEWEST:
            return
        # A step has ended when the slowest rank has.
        self._tell([max(times) for times in zip(*(one.seconds[-steps:] for one in seen), strict=True)])
        free = min(one.free_bytes for one in seen)
        while self._search.point is not None and not self._fits(self._search.point, free):
            self._search.tell([])
        self._go_on(self._search)

    def _tell(self, seconds: Sequence[float]) -> None:
        assert self._search is not None
        self._search.tell(seconds)
        if self._record is not None:
            self._record.tried(self._search.trials[-1])

    def _go_on(self, search: Search) -> None:
        outcome = search.outcome
        self._move_to(search.point if outcome is None else outcome.best.point)
        if outcome is None:
            return
        self._search = _searching[0] = None
        if self._record is not None:
            self._record.ended(outcome, self.rounds)
        self._found(outcome)

    def _move_to(self, settings: PlanSettings) -> None:
        if settings != self._settings:
            old = self._moving
            self._take(self._reopen(settings), settings)
            old.close()

    def _fits(self, settings: PlanSettings, free_bytes: int) -> bool:
        return self._shape.shared_bytes(settings) <= _MOST_OF_FREE * free_bytes

    def _free(self) -> int:
        try:
            found = os.statvfs(self._directory)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize

    def _is_busy(self) -> bool:
        """Is another plan searching, and getting on with it?"""
        other = _searching[0]() if _searching[0] is not None else None
        if other is None or other is self:
            return False
        before, self._seen_of_other = self._seen_of_other, other.rounds
        return other.rounds > before

    def drain_and_close(self) -> None:
        """See BucketReducer."""
        self._end(self._moving.drain_and_close)

    def close(self) -> None:
        """See BucketReducer."""
        self._end(self._moving.close)

    def _end(self, close: Callable[[], None]) -> None:
        if self._record is not None:
            self._record.closed()
        self._search = None
        close()


#: The plan of this process that is searching, if one is.
_searching: list[weakref.ref[TunedReducer] | None] = [None]


def _weakly(held: weakref.ref[TunedReducer]) -> Callable[[], Action | None]:
    def find() -> Action | None:
        reduction = held()
        return None if reduction is None else reduction._decide

    return find
