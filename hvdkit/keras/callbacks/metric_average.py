"""MetricAverageCallback: metrics of an epoch over all ranks' samples."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.keras.asynchronous import finish_steps
from hvdkit.keras.averages import average_metrics


class MetricAverageCallback(keras.callbacks.Callback):
    """Write metrics over the samples of all ranks into the logs of each epoch, for the callbacks after this one.

    The result is exact for unequal shards and for metrics that are not means; see average_metrics(). Put it before
    callbacks that use metrics (ReduceLROnPlateau, TensorBoard, ModelCheckpoint, EarlyStopping), so that these act alike
    on every rank. Before its collective it calls finish() of an optimizer that has that method.

    device: accepted as in Horovod, and ignored. process_set: the ranks to average over.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.device = device
        self.process_set = process_set
        self._training: dict[str, float] | None = None
        self._testing: dict[str, float] = {}
        self._in_epoch = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin the metrics of an epoch."""
        self._training, self._testing, self._in_epoch = None, {}, True

    def on_test_begin(self, logs: Any = None) -> None:
        """Save the metrics of training: validation uses the same objects."""
        if self._in_epoch and self._training is None:
            finish_steps(self.model)
            self._training = average_metrics(self.model, process_set=self.process_set)

    def on_test_end(self, logs: Any = None) -> None:
        """Average the metrics of validation."""
        self._testing = average_metrics(self.model, process_set=self.process_set)
        if logs is not None:
            logs.update({name: value for name, value in self._testing.items() if name in logs})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the averages into the logs."""
        self._in_epoch = False
        finish_steps(self.model)
        if logs is None:
            return
        validation = {f"val_{name}": value for name, value in self._testing.items()}
        others = {
            name: value
            for name, value in logs.items()
            if isinstance(value, (int, float)) and name not in validation and name not in (self._training or {})
        }
        averages = self._training or {}
        if self._training is None or others:
            averages = {**average_metrics(self.model, others, process_set=self.process_set), **averages}
        averages.update(validation)
        logs.update({name: value for name, value in averages.items() if name in logs})
