"""TrackCallback: metrics of fit(), and hvdkit's own series, in CSV files, TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.keras.averages import count_samples
from hvdkit.keras.callbacks.metric_average import MetricAverageCallback
from hvdkit.tracking.targets import Path, Targets
from hvdkit.tracking.tracker import Tracker, open_tracker


class TrackCallback(MetricAverageCallback):
    """Write the metrics of each epoch over the samples of all ranks, and hvdkit's own series, from rank 0.

    The step of a value is the epoch, so hvdkit/step_ms is the time of an epoch with its validation. It averages as
    MetricAverageCallback does, which is then not needed. Put it after callbacks that write into the logs.

    tensorboard, wandb, mlflow, csv, writers: as for hvd.track(), which is called at the beginning of fit().
    process_set: the ranks to average over; the own series are those of all ranks.
    """

    def __init__(
        self,
        *,
        tensorboard: Path | None = None,
        wandb: str | Mapping[str, Any] | None = None,
        mlflow: str | Mapping[str, Any] | None = None,
        csv: Path | None = None,
        writers: Mapping[str, Any] | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(process_set=process_set)
        self._targets = Targets(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow, csv=csv, writers=writers)
        self._tracker: Tracker | None = None
        self._started = False  # whether the first window of hvdkit's own series has begun
        self._samples: float | None = None  # of the epoch's training, on this rank

    def on_train_begin(self, logs: Any = None) -> None:
        """Open the targets, and close those of a fit() that an exception has ended."""
        if self._tracker is not None:
            self._tracker.abandon()
        self._tracker, self._started = open_tracker(self._targets, every=1), False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See MetricAverageCallback. The first epoch is that of fit(initial_epoch=)."""
        super().on_epoch_begin(epoch, logs)
        self._samples = None
        if self._tracker is not None and not self._started:
            self._tracker.start(epoch - 1)
            self._started = True

    def on_test_begin(self, logs: Any = None) -> None:
        """See MetricAverageCallback. Validation uses the same objects to count samples."""
        super().on_test_begin(logs)
        if self._in_epoch and self._samples is None:
            self._samples = count_samples(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the metrics, and write them."""
        super().on_epoch_end(epoch, logs)
        if self._tracker is not None and logs is not None:
            numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
            samples = count_samples(self.model) if self._samples is None else self._samples
            self._tracker.log(numbers, step=epoch, samples=samples)

    def on_train_end(self, logs: Any = None) -> None:
        """Write the remaining values."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None
