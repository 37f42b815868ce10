"""The training of KerasEstimator on a rank."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

import hvdkit.keras as hvd
from hvdkit_spark.common.batches import Batches
from hvdkit_spark.common.checkpoints import History
from hvdkit_spark.common.training import Trained, Training
from hvdkit_spark.keras.models import dump_values, load_model, load_values


@dataclass(frozen=True)
class KerasObjects:
    """The parameters of the estimator in the form that is sent.

    The model is sent as its file, the optimizer as its configuration.
    """

    model: bytes
    optimizer: dict[str, Any]
    loss: Any
    metrics: list[Any] | None
    loss_weights: list[float] | None
    callbacks: list[keras.callbacks.Callback]
    custom_objects: dict[str, Any]
    compression: Any
    backward_passes_per_step: int


def train(training: Training, objects: bytes) -> Trained | None:
    """Train on all ranks; returns the model on rank 0. objects: KerasObjects, pickled."""
    hvd.init()
    given: KerasObjects = pickle.loads(objects)
    keras.utils.set_random_seed(training.seed + hvd.rank())
    model = load_model(given.model, given.custom_objects)
    optimizer = keras.saving.deserialize_keras_object(given.optimizer, custom_objects=given.custom_objects)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        compression=hvd.Compression.none if given.compression is None else given.compression,
        backward_passes_per_step=given.backward_passes_per_step,
    )
    model.compile(optimizer, loss=given.loss, metrics=given.metrics, loss_weights=given.loss_weights)
    optimizer.build(model.trainable_variables)
    checkpoint = training.resume(hvd.rank(), hvd.broadcast_object)
    if checkpoint is not None:
        load_values(checkpoint.state, weights=model.variables, optimizer=optimizer.variables)
    rows = training.open_train(hvd.rank(), hvd.size())
    tests = training.open_validation(hvd.rank(), hvd.size())
    first = checkpoint.epochs if checkpoint is not None else 0
    keeping = _Keep(training, dict(checkpoint.history) if checkpoint is not None else {})
    options: dict[str, Any] = {}
    if tests is not None:
        options["validation_steps"] = training.validation_steps or len(tests)
        options["validation_data"] = _feed(training, tests, options["validation_steps"], 0)
    steps = training.train_steps or len(rows)
    model.fit(
        _feed(training, rows, steps, first),
        steps_per_epoch=steps,
        epochs=training.epochs,
        initial_epoch=first,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            keeping,
            *given.callbacks,
        ],
        **options,
    )
    if hvd.rank() != 0:
        return None
    widths = [math.prod(each.shape[1:]) for each in model.outputs]
    return Trained(dump_values(weights=model.variables), keeping.history, widths)


class _Keep(keras.callbacks.Callback):
    """Keeps the history of all epochs, writes a checkpoint of the last one on rank 0, and logs a line."""

    def __init__(self, training: Training, history: History) -> None:
        super().__init__()
        self.history = history
        self._training = training

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        found = {name: float(value) for name, value in (logs or {}).items()}
        for name, value in found.items():
            self.history.setdefault(name, []).append(value)
        if hvd.rank() != 0:
            return
        self._training.report(epoch + 1, found)
        self._training.save(self._pack, self.history, epoch + 1)

    def _pack(self) -> bytes:
        return dump_values(weights=self.model.variables, optimizer=self.model.optimizer.variables)


def _feed(training: Training, batches: Batches, steps: int, epoch: int) -> Iterator[tuple[Any, ...]]:
    """Iterate over the batches of all epochs from this one on, as fit() takes them."""
    while True:
        for arrays in batches.epoch(epoch, steps):
            batch = training.split(arrays)
            inputs = tuple(batch.inputs) if len(batch.inputs) > 1 else batch.inputs[0]
            labels = tuple(batch.labels) if len(batch.labels) > 1 else batch.labels[0]
            yield (inputs, labels) if batch.weight is None else (inputs, labels, batch.weight)
        epoch += 1
