"""The tuner of a plan: tries settings during training, and keeps the fastest.

On the machine for which the defaults were chosen (two cores), the settings that it finds hardly shorten a step. The
ratios to the step with the defaults are x0.99 (8 large layers) and x0.96 (101 small layers) on 2 ranks of a host, x0.99
(large layers) on 2 hosts at 1 Gbit/s, and x0.94 (small layers) on 3 hosts with a delay of 1 ms
(`sudo python -m benchmarks.autotune --hosts`; 3 rounds, whose ratios differ by about 0.05). The tuner is for other
machines. It costs nothing unless it is switched on.
"""

from __future__ import annotations

import csv
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hvdkit.engine.named.submit import collective_step
from hvdkit.engine.planned.reducer import BucketReducer
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.engine.tuning.search import UNORDERED, Outcome, Search, Shape, Trial
from hvdkit.log import logger
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import allgather_object

STEPS_A_TRIAL = 10
_WARM_UP = 2  # first steps of a trial that are not counted, because new memory is slow at first
_FEWEST = 4  # minimum number of steps of a trial that counts
_MOST_OF_FREE = 0.5  # maximum fraction of the free shared memory for a trial
_COLUMNS = ("plan", "trial", *(field.name for field in fields(PlanSettings)), "steps", "median_ms", "noise_ms")


class Record:
    """The record of one plan's search, on one rank: a line in a file for each trial, and a line in the log at the end.

    name: of the plan. path: of the CSV file, which several plans share; "" for none. save: called with the outcome.
    """

    def __init__(self, name: str, path: str, save: Callable[[Outcome], None]) -> None:
        self._name, self._path, self._save, self._trials, self._over = name, path, save, 0, False

    def tried(self, trial: Trial) -> None:
        """Record a trial."""
        self._trials += 1
        logger.info("autotune of %s: %.2f ms per step with %s", self._name, 1000 * trial.median_s, trial.point)
        if not self._path:
            return
        numbers = (len(trial.seconds), f"{1000 * trial.median_s:.3f}", f"{1000 * trial.noise_s:.3f}")
        try:
            new = not Path(self._path).exists()
            with open(self._path, "a", newline="", encoding="utf-8") as file:
                write = csv.writer(file).writerow
                if new:
                    write(_COLUMNS)
                write((self._name, self._trials, *asdict(trial.point).values(), *numbers))
        except OSError as error:
            logger.warning(
                "The autotune log %s cannot be written: %s. Further trials are not logged.", self._path, error.strerror
            )
            self._path = ""

    def ended(self, outcome: Outcome, steps: int) -> None:
        """Record and save the outcome of the search."""
        self._over = True
        first, best = outcome.first, outcome.best
        after = (self._name, self._trials, steps)
        before_ms, noise_ms = 1000 * first.median_s, 1000 * first.noise_s
        if best is first:
            logger.warning(
                "autotune of %s: after %d trials in %d steps, no settings were measurably faster than the first "
                "ones, which are kept: %s (%.2f +- %.2f ms per step).",
                *(*after, first.point, before_ms, noise_ms),
            )
        else:
            logger.warning(
                "autotune of %s: after %d trials in %d steps, selected %s: %.2f ms per step instead of %.2f (+- "
                "%.2f), %.1f %% less.",
                *(*after, best.point, 1000 * best.median_s, before_ms, noise_ms, 100 * outcome.gain),
            )
        self._save(outcome)

    def closed(self) -> None:
        """Warn if the plan is closed before the search is over."""
        if not self._over:
            self._over = True
            logger.warning(
                "autotune of %s: training ended, or its parameters changed, after %d trials, before the search was "
                "complete. No settings were selected or saved. --autotune-steps sets the length of the search.",
                *(self._name, self._trials),
            )


@dataclass(frozen=True)
class _Report:
    """A rank's report at the end of a trial.

    seconds: of each step. free_bytes: free shared memory. busy: Is another of its plans being searched?
    """

    seconds: tuple[float, ...]
    free_bytes: int
    busy: bool


class Tuner:
    """Searches the settings of one plan; called by the reducer's on_round_end.

    All ranks decide from the measurements of all ranks, at the end of the same round, and so select the same settings.
    They decide nothing while a rank has joined. Only one plan is searched at a time. All ranks create it together.

    reducer: of a plan with an engine.
    first: the settings with which the plan was opened.
    axes: see Search.
    trials: maximum number of trials.
    directory: of shared memory.
    record: the record on rank 0; None on other ranks.
    """

    def __init__(
        self,
        reducer: BucketReducer,
        first: PlanSettings,
        axes: Mapping[str, Sequence[Any]],
        *,
        trials: int,
        directory: str,
        record: Record | None,
    ) -> None:
        context, engine = reducer.context, reducer.context.engine
        assert engine is not None
        self._reducer, self._engine, self._name = reducer, engine, context.name
        self._settings, self._directory, self._record = first, directory, record
        transport, nbytes = context.transport, sum(bucket.nbytes for bucket in reducer.plan.buckets)
        self._shape = Shape(nbytes, transport.name, transport.local_ranks, transport.shards)
        self._search = Search(first, axes, unordered=UNORDERED, most=trials, same=self._shape.same)
        self._seconds: list[float] = []
        self._round_ended_s = 0.0
        self.rounds = 0
        self._rounds_of_other = -1
        engine.joining.contributions[f"tune.{self._name}"] = weakref.WeakMethod(self.decide)
        if record is not None:
            weakref.finalize(self, record.closed)  # also at the end of the process
        reducer.on_round_end = self._round_ended

    def _round_ended(self) -> None:
        now = time.perf_counter()
        self._seconds.append(now - self._round_ended_s)
        self._round_ended_s = now
        self.rounds += 1
        # This number is the same on all ranks, even on ranks that had joined before.
        if self._engine.joining.rounds[self._name] % STEPS_A_TRIAL == 0:
            collective_step(self._engine, "tune", self.decide, name=self._name)
            self._seconds.clear()
            self._round_ended_s = time.perf_counter()

    def decide(self, transport: Transport, joined: Sequence[int]) -> None:
        """End a trial and begin the next; collective."""
        if joined or self._search.outcome is not None:
            return
        mine = _Report(tuple(self._seconds[_WARM_UP:]), self._free_bytes(), self._is_busy())
        reports = allgather_object(transport, mine)
        if any(report.busy for report in reports):
            return
        _searching[0] = weakref.ref(self)
        steps = min(len(report.seconds) for report in reports)
        if steps < _FEWEST:
            return
        # A step ends when its slowest rank ends it.
        self._search.record(
            [max(times) for times in zip(*(report.seconds[-steps:] for report in reports), strict=True)]
        )
        if self._record is not None:
            self._record.tried(self._search.trials[-1])
        free = min(report.free_bytes for report in reports)
        while self._search.point is not None and self._shape.shared_bytes(self._search.point) > _MOST_OF_FREE * free:
            self._search.record([])
        outcome = self._search.outcome
        settings = self._search.point if outcome is None else outcome.best.point
        if settings != self._settings:
            self._settings = settings
            self._reducer.replan(settings)
        if outcome is not None:
            self._reducer.on_round_end = _searching[0] = None
            if self._record is not None:
                self._record.ended(outcome, self.rounds)

    def _free_bytes(self) -> int:
        try:
            memory = os.statvfs(self._directory)
        except OSError:
            return 0
        return memory.f_bavail * memory.f_frsize

    def _is_busy(self) -> bool:
        """Return whether another plan is being searched, and has had rounds since the last call."""
        other = _searching[0]() if _searching[0] is not None else None
        if other is None or other is self:
            return False
        before, self._rounds_of_other = self._rounds_of_other, other.rounds
        return other.rounds > before


#: The tuner of this process that is searching; None without one.
_searching: list[weakref.ref[Tuner] | None] = [None]
