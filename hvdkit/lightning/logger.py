"""A logger of Lightning that averages over the ranks: hvd.track() behind `self.log()`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import Logger

from hvdkit.log import logger
from hvdkit.tracking.targets import Path
from hvdkit.tracking.tracker import Tracker, track


class HvdkitLogger(Logger):
    """Write what `self.log()` logs, averaged over all ranks, and hvdkit's own series: `Trainer(logger=...)`.

    Lightning hands numbers on without their samples, so ranks count alike, and samples_per_s is not written;
    sync_dist=True is not needed for them.
    tensorboard, wandb, mlflow, csv: as for hvd.track(), which the first values call. A logger is one run, also for
    test() after fit(). every: log_every_n_steps, times this number, is a window.
    """

    def __init__(
        self,
        *,
        tensorboard: Path | None = None,
        wandb: str | Mapping[str, Any] | None = None,
        mlflow: str | Mapping[str, Any] | None = None,
        csv: Path | None = None,
        every: int = 10,
    ) -> None:
        super().__init__()
        self._places = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "csv": csv}
        self._every = every
        self._tracker: Tracker | None = None

    @property
    def name(self) -> str:
        """The folder of Lightning's own checkpoints; "hvdkit" would be the package where a script runs in the clone."""
        return "hvdkit_logs"

    @property
    def version(self) -> str:
        """There are no versions."""
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers; Lightning calls this on every rank."""
        if self._tracker is None:
            self._tracker = track(**self._places, every=self._every)  # type: ignore[arg-type]
            self._tracker.counts_samples = False
        self._tracker.log(metrics, step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Hyperparameters are not numbers over steps, and are not written."""

    def finalize(self, status: str) -> None:
        """Write what is left, unless the training has failed: then the other ranks may not come."""
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        targets = tracker.continuing  # Trainer.test() after Trainer.fit() belongs to the same run
        self._places = {name: getattr(targets, name) for name in self._places}
        if status == "success":
            tracker.close()
        else:
            logger.info("HvdkitLogger: the training ended as %r; the last window is not written.", status)
            # Lightning says "failed" of each; its SIGTERMException is a SystemExit.
            killed = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
            tracker.abandon("KILLED" if killed else "FAILED")
