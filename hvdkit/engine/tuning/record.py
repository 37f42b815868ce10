"""The record of a search for the user: a line of a CSV file for each trial, and a line of the log at the end."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.engine.tuning.search import Outcome, Trial
from hvdkit.log import logger

_COLUMNS = ("plan", "trial", *(field.name for field in fields(PlanSettings)), "steps", "median_ms", "noise_ms")


class Record:
    """The record of one plan's search, on one rank.

    path: of the CSV file, which several plans share; "" for none. save: called with the outcome.
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
