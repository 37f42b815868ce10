"""Saves checkpoints during training, at intervals and when the job must end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hvdkit.checkpoint.agreement import Agreement
from hvdkit.checkpoint.checkpointable import Checkpointable
from hvdkit.checkpoint.preemption import Signals, end_saved
from hvdkit.checkpoint.store import Store
from hvdkit.engine import runtime as engine
from hvdkit.errors import CheckpointError
from hvdkit.log import logger

#: Names of the options in other libraries: Keras, TensorFlow, Lightning, Ignite, Transformers.
_OTHER_NAMES = {
    **dict.fromkeys(
        ("save_freq", "checkpoint_interval", "save_interval", "interval", "save_every", "period"), "every_s"
    ),
    **dict.fromkeys(("every_n_steps", "every_n_train_steps", "every_n_epochs", "save_steps"), "every_s"),
    **dict.fromkeys(("max_to_keep", "keep_last", "keep_last_n", "save_top_k", "n_saved", "save_total_limit"), "keep"),
}
_OPTIONS = {"every_s": "the seconds between two checkpoints", "keep": "the number of checkpoints that are kept"}


def refuse_options(values: Mapping[str, Any]) -> None:
    """Raise TypeError for a value with the name of a misspelt or another library's option: it would only be saved."""
    for name, value in values.items():
        meant = _OTHER_NAMES.get(name) or next(iter(get_close_matches(name, _OPTIONS, 1, 0.77)), "")
        if meant:
            raise TypeError(
                f"{name}={value!r} is no option of checkpoints, and would be saved as a value. If you mean "
                f"{_OPTIONS[meant]}, it is {meant}=. If it is a value to save, give it another name."
            )


class TrainingCheckpoints(Store):
    """The base class of the adapters' Checkpoints.

    directory: the directory of checkpoints.
    state: the objects to save.
    values: see Store.
    every_s: smallest number of seconds between two checkpoints.
    keep: see CheckpointDirectory.
    Raises TypeError as refuse_options() does, ValueError as Store does.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: Checkpointable,
        values: Mapping[str, Any],
        *,
        every_s: float,
        keep: int,
    ) -> None:
        refuse_options(values)
        super().__init__(directory, state, values, keep=keep)
        self._every_s = every_s
        self._signals = Signals()
        self._agreement = Agreement()
        self._saved_s = time.monotonic()

    def step(self, samples: int | None = None) -> None:
        """Save a checkpoint if one is due; every rank calls this after each step of the optimizer.

        samples: the number of samples that this rank used in the step; needed if a sampler is saved.
        If any rank has received SIGTERM, SIGUSR1 or SIGUSR2, all ranks save after the same step, and this raises
        Preempted, a SystemExit with code 75: the training is saved but not finished, and the same command continues it.
        Raises CheckpointError on rank 0 if an earlier checkpoint could not be written. An elastic job logs the error
        and continues, because without rank 0 the other ranks would fail with the same error.
        """
        self._state.record(samples)
        if not self._agreement.is_due():
            return
        self._state.settle()
        agreed = self._agreement.ask(self._signals.number, time.monotonic() - self._saved_s >= self._every_s)
        if agreed.signal:
            end_saved(agreed, self._save_whole)
        if agreed.save and engine.runtime("a checkpoint").config.elastic:
            self._try_to_save()
        elif agreed.save:
            self._save(during_epoch=True)

    def _try_to_save(self) -> None:
        with contextlib.suppress(CheckpointError):
            self.wait()  # for the previous checkpoint, whose error has been logged
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
        """Wait until the last checkpoint is on the disk, and restore the signal handlers.

        Raises CheckpointError on rank 0 if the last checkpoint could not be written.
        """
        self._signals.close()
        self.wait()
