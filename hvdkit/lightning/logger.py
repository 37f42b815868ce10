"""A Lightning logger that averages over the ranks: hvd.track() behind `self.log()`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import Logger

from hvdkit.log import logger
from hvdkit.tracking.targets import Path, Targets
from hvdkit.tracking.tracker import Tracker, open_tracker


class HvdkitLogger(Logger):
    """Write what `self.log()` logs, averaged over all ranks, and hvdkit's own series: `Trainer(logger=...)`.

    Lightning passes numbers without their sample counts, so all ranks have the same weight, and samples_per_s is not
    written; sync_dist=True is not needed.

    tensorboard, wandb, mlflow, csv, writers: as for hvd.track(), which is called with the first values. A logger is one
    run, also for test() after fit().
    every: a window has log_every_n_steps times this number of steps.
    """

    def __init__(
        self,
        *,
        tensorboard: Path | None = None,
        wandb: str | Mapping[str, Any] | None = None,
        mlflow: str | Mapping[str, Any] | None = None,
        csv: Path | None = None,
        writers: Mapping[str, Any] | None = None,
        every: int = 10,
    ) -> None:
        super().__init__()
        self._targets = Targets(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow, csv=csv, writers=writers)
        self._every = every
        self._tracker: Tracker | None = None

    @property
    def name(self) -> str:
        """Folder of Lightning's own checkpoints; not "hvdkit", which in a clone's root would be the package."""
        return "hvdkit_logs"

    @property
    def version(self) -> str:
        """Empty, as the logger has no versions."""
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers; Lightning calls this on every rank."""
        if self._tracker is None:
            self._tracker = open_tracker(self._targets, self._every)
            self._tracker.counts_samples = False
        self._tracker.log(metrics, step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: hyperparameters are not numbers over steps."""

    def finalize(self, status: str) -> None:
        """Write the remaining rows, unless the training has failed: other ranks may then not take part."""
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        self._targets = tracker.continuing  # Trainer.test() after Trainer.fit() belongs to the same run
        if status == "success":
            tracker.close()
        else:
            logger.info("HvdkitLogger: the training ended as %r; the last window is not written.", status)
            # Lightning's status is "failed" for each; its SIGTERMException is a SystemExit.
            killed = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
            tracker.abandon("KILLED" if killed else "FAILED")
