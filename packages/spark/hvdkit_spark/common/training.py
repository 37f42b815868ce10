"""Data and options of a training on the ranks, for all frameworks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hvdkit.errors import ConfigError
from hvdkit_spark.common.batches import Batches
from hvdkit_spark.common.checkpoints import Checkpoint, Checkpoints, History
from hvdkit_spark.common.dataset import Arrays, DataSet
from hvdkit_spark.common.store import Store

Shapes = list[list[int]]


@dataclass(frozen=True)
class Training:
    """Data and options, from the estimator's parameters. weight: the column of sample weights; "" for none."""

    store: Store
    run_id: str
    train: DataSet
    validation: DataSet | None
    features: list[str]
    labels: list[str]
    weight: str
    input_shapes: Shapes | None
    label_shapes: Shapes | None
    batch_size: int
    val_batch_size: int
    epochs: int
    train_steps: int | None
    validation_steps: int | None
    shuffle: bool
    buffer_rows: int
    cache: bool
    seed: int
    verbose: int

    def open_train(self, rank: int, size: int) -> Batches:
        """Open the training batches of a rank."""
        return Batches(
            self.store,
            self.train,
            self.batch_size,
            rank=rank,
            size=size,
            seed=self.seed if self.shuffle else None,
            buffer_rows=self.buffer_rows,
            cache=self.cache,
        )

    def open_validation(self, rank: int, size: int) -> Batches | None:
        """Open the validation batches of a rank; None without validation.

        Raises ConfigError for fewer rows than ranks.
        """
        if self.validation is None:
            return None
        if self.validation.rows < size:
            raise ConfigError(
                f"There are {self.validation.rows} rows for validation, fewer than {size} ranks. Raise validation."
            )
        return Batches(
            self.store, self.validation, self.val_batch_size, rank=rank, size=size, evaluation=True, cache=self.cache
        )

    def split(self, batch: Arrays) -> Batch:
        """Split a batch into inputs, labels and weights, in the shapes that the parameters give."""
        inputs = shape_arrays([batch[name] for name in self.features], self.input_shapes)
        labels = shape_arrays([batch[name] for name in self.labels], self.label_shapes)
        return Batch(inputs, labels, batch[self.weight] if self.weight else None)

    def resume(self, rank: int, broadcast: Callable[[Checkpoint | None], Checkpoint | None]) -> Checkpoint | None:
        """Load the checkpoint of this run on all ranks; None if there is none.

        broadcast: sends an object of rank 0 to all.
        """
        found = Checkpoints(self.store, self.run_id).load() if rank == 0 and self.store.saving_runs() else None
        return broadcast(found)

    def report(self, epoch: int, values: Mapping[str, float]) -> None:
        """Write a line about an epoch, counted from 1, unless verbose is 0; rank 0 calls this."""
        if self.verbose:
            listed = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            sys.stdout.write(f"epoch {epoch} of {self.epochs}: {listed}\n")

    def save(self, state: Callable[[], bytes], history: History, epochs: int) -> None:
        """Save a checkpoint; rank 0 calls this. state: function that makes the state."""
        if self.store.saving_runs():
            Checkpoints(self.store, self.run_id).save(Checkpoint(state(), history, epochs))


class Batch(NamedTuple):
    """A batch: an array for each input and each label of the model. weight: of each row."""

    inputs: list[NDArray[Any]]
    labels: list[NDArray[Any]]
    weight: NDArray[Any] | None


class Trained(NamedTuple):
    """The result of rank 0. state: the parameters of the model, as its framework writes them.

    output_widths: for each output, how many numbers the model returns for a row.
    """

    state: bytes
    history: History
    output_widths: list[int]


def shape_arrays(arrays: list[NDArray[Any]], shapes: Shapes | None) -> list[NDArray[Any]]:
    """Reshape each array; without shapes, return the arrays as they are."""
    return arrays if shapes is None else [array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)]


def check_shapes(training: Training) -> None:
    """Raise ConfigError for a shape that does not fit the count of numbers in a row."""
    for columns, shapes in ((training.features, training.input_shapes), (training.labels, training.label_shapes)):
        if shapes is not None and len(shapes) != len(columns):
            raise ConfigError(f"There are {len(columns)} columns for {len(shapes)} shapes: {columns}, {shapes}.")
        for column, shape in zip(columns, shapes or (), strict=False):
            width, wanted = training.train.widths[column] or 1, math.prod(shape[1:])
            if shape[:1] == [-1] and -1 not in shape[1:] and width != wanted:
                raise ConfigError(
                    f"Column {column!r} has {width} numbers in a row, but the shape {shape} needs {wanted}. Set "
                    "feature_cols in the order of the model's inputs, or input_shapes."
                )
