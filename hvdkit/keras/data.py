"""shard(): this rank's elements of a dataset, for arrays, keras.utils.PyDataset and tf.data."""

from __future__ import annotations

from typing import Any, Literal

import keras
import numpy as np

from hvdkit.engine import runtime as engine
from hvdkit.keras.validation import note_repeated
from hvdkit.training.sharding import Indices, check_uneven, plan_order, split_for_evaluation, split_for_training

Uneven = Literal["pad", "drop"]


def shard(
    data: Any,
    *,
    evaluation: bool = False,
    uneven: Uneven = "pad",
    rank: int | None = None,
    size: int | None = None,
) -> Any:
    """Return the elements of a dataset that this rank trains on or evaluates.

    data: an array of numpy or of the backend, shape (n, ...); a tuple, list or dict of such arrays with the same n; a
    PyDataset; or a tf.data.Dataset, whose elements are distributed as they are (batches if it is batched, else
    samples). The result has the same type.
    evaluation: False: every rank gets the same number of elements, so that all ranks make the same number of steps, and
    elements are dealt out in turn, so that the batches of all ranks together are those of one process. True: every
    element is on exactly one rank, and the numbers of elements may differ by one; use hvd.evaluate() or
    MetricAverageCallback, which weight by samples. predict() needs True to predict each row once.
    uneven: in training, if the number of elements is not a multiple of the number of ranks, "pad" repeats a few
    elements and "drop" leaves a few out. fit(validation_data=...), evaluate() and hvd.evaluate() leave out repeated
    elements, if their argument is the result of this function or a view of its numpy arrays, and fit() also with
    validation_split. In anything else that is made from the result they are not known.
    rank: this rank; None: that of the job.
    size: number of ranks; None: that of the job.


    Raises NotInitializedError before init() if rank or size is None, TypeError for another type of data, ValueError for
    another `uneven`, arrays of different lengths or a tf.data.Dataset of unknown length.
    """
    check_uneven(uneven)
    if rank is None or size is None:
        world = engine.runtime("shard()").world
        rank = world.rank if rank is None else rank
        size = world.size if size is None else size
    if isinstance(data, keras.utils.PyDataset):
        batches = _pick(len(data), evaluation, uneven, rank, size)
        part = _ShardedPyDataset(data, batches)
        repeats = _repeats(len(data), evaluation, uneven, rank, size)
        return note_repeated(part, lambda _: _ShardedPyDataset(data, batches[:-1])) if repeats else part
    if hasattr(data, "cardinality") and hasattr(data, "shard"):
        return _shard_tf(data, evaluation, uneven, rank, size)
    length = count_rows(data, "shard()", "arrays, a PyDataset or a tf.data.Dataset")
    part = take_rows(data, _pick(length, evaluation, uneven, rank, size))
    if _repeats(length, evaluation, uneven, rank, size):
        for array in keras.tree.flatten(part):
            note_repeated(array, lambda array: array[:-1])
    return part


def _repeats(length: int, evaluation: bool, uneven: Uneven, rank: int, size: int) -> bool:
    """Return whether this rank's last element repeats one of another rank."""
    return not evaluation and uneven == "pad" and 0 < length % size <= rank


def count_rows(data: Any, who: str, takes: str) -> int:
    """Return the common length of all arrays of a structure.

    Raises TypeError for an object that is not an array, ValueError for different lengths; messages name `who` and
    `takes`.
    """
    arrays = keras.tree.flatten(data)
    lengths = {len(array) for array in arrays if hasattr(array, "shape")}
    if not arrays or any(not hasattr(array, "shape") for array in arrays):
        raise TypeError(
            f"{who} takes {takes}, not {type(data).__name__}. For a torch DataLoader use the samplers of "
            f"hvdkit.torch.data. A generator must yield different samples on each rank."
        )
    if len(lengths) > 1:
        raise ValueError(f"{who}: the arrays have different lengths: {sorted(lengths)}.")
    return lengths.pop()


def take_rows(data: Any, rows: Indices) -> Any:
    """Return these rows of all arrays of a structure."""
    return keras.tree.map_structure(lambda array: _rows(array, rows), data)


def _pick(length: int, evaluation: bool, uneven: Uneven, rank: int, size: int) -> Indices:
    order = plan_order(length, seed=None)
    if evaluation:
        return split_for_evaluation(order, rank=rank, size=size)
    return split_for_training(order, rank=rank, size=size, uneven=uneven)


def _rows(array: Any, rows: Indices) -> Any:
    return array[rows] if isinstance(array, np.ndarray) else keras.ops.take(array, rows, axis=0)


def _shard_tf(data: Any, evaluation: bool, uneven: Uneven, rank: int, size: int) -> Any:
    count = int(data.cardinality())
    if evaluation or count == -1:  # infinite: no rank ends first
        return data.shard(size, rank)
    if count < 0:
        raise ValueError(
            "shard(): the length of this tf.data.Dataset is unknown, so ranks could take different numbers of steps. "
            "Set it with data.apply(tf.data.experimental.assert_cardinality(n)), or use shard(data.repeat()) and pass "
            "steps_per_epoch to fit()."
        )
    if uneven == "drop":
        return data.take(count // size * size).shard(size, rank)
    part = data.concatenate(data.take(-count % size)).shard(size, rank)
    repeats = _repeats(count, evaluation, uneven, rank, size)
    return note_repeated(part, lambda _: data.shard(size, rank)) if repeats else part


class _ShardedPyDataset(keras.utils.PyDataset):
    """Some batches of another PyDataset."""

    def __init__(self, whole: keras.utils.PyDataset, batches: Indices) -> None:
        super().__init__(
            workers=whole.workers,
            use_multiprocessing=whole.use_multiprocessing,
            max_queue_size=whole.max_queue_size,
        )
        self._whole, self._batches = whole, batches.tolist()

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._whole[self._batches[index]]

    def on_epoch_begin(self) -> None:
        self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._whole.on_epoch_end()
