"""Checkpoints of a training that goes on: saved when it is time, and when the job has to end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from hvdkit.checkpoint.agreement import Agreement
from hvdkit.checkpoint.ending import end_saved
from hvdkit.checkpoint.kept import Kept
from hvdkit.checkpoint.signals import Signals
from hvdkit.checkpoint.store import Store
from hvdkit.engine import runtime as engine
from hvdkit.errors import CheckpointError
from hvdkit.log import logger


class TrainingCheckpoints(Store):
    """What an adapter's Checkpoints are made of. every_s: seconds between checkpoints, at least."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        kept: Kept,
        values: Mapping[str, Any],
        *,
        every_s: float,
        keep: int,
    ) -> None:
        super().__init__(directory, kept, values, keep=keep)
        self._every_s = every_s
        self._signals = Signals()
        self._agreement = Agreement()
        self._saved_s = time.monotonic()

    def step(self, samples: int | None = None) -> None:
        """A step is done: save if it is time; every rank calls it equally often, after the optimizer's step.

        samples: that this rank has trained on in it; to be said where a sampler is kept.
        If SIGTERM, SIGUSR1 or SIGUSR2 has come to any rank, all ranks save after the same step, and this raises
        Preempted, a SystemExit with code 75: "saved, not finished; start me again".
        Raises CheckpointError, on rank 0, if an earlier checkpoint could not be written; in an elastic job that is told
        and training goes on, as others would go on without rank 0 and run into the same.
        """
        self._kept.record(samples)
        if not self._agreement.is_due():
            return
        self._kept.settle()
        agreed = self._agreement.ask(self._signals.number, time.monotonic() - self._saved_s >= self._every_s)
        if agreed.signal:
            end_saved(agreed, self._save_whole)
        if agreed.save and engine.runtime("a checkpoint").config.elastic:
            self._try_to_save()
        elif agreed.save:
            self._save(during_epoch=True)

    def _try_to_save(self) -> None:
        with contextlib.suppress(CheckpointError):
            self.wait()  # for the one before, which has told its error
        try:
            self._save(during_epoch=True)
        except CheckpointError as error:  # on rank 0
            logger.error("%s", error)

    def _save(self, *, during_epoch: bool) -> None:
        self._saved_s = time.monotonic()
        super()._save(during_epoch=during_epoch)

    def _save_whole(self) -> None:
        self._save(during_epoch=True)
        self.wait()

    def close(self) -> None:
        """At the end of the training: return when all is on the disk; signals are no longer heard then.

        Raises CheckpointError, on rank 0, if the last checkpoint could not be written.
        """
        self._signals.close()
        self.wait()
