"""Replace the arguments of fit() with this rank's rows of the batches that one process would train on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np

import hvdkit.keras as hvd
from hvdkit.training.sharding import Indices, plan_order
from hvdkit_wrap import keras_weights, randomness
from hvdkit_wrap.keras_tf_data import split_tf_data
from hvdkit_wrap.refusal import refuse
from hvdkit_wrap.session import current
from hvdkit_wrap.shares import Share, is_split, joined_length, plan_share

_FIT_BATCH = 32  # Keras's own default


@contextmanager
def split(model: Any, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Put this rank's rows into the arguments of fit(); yields the report's texts on the data and on the batches.

    Raises WrapError for data whose rows cannot be split.
    """
    x: Any = given.get("x")
    session, size = current(), hvd.size()
    times = size if session.multiplies else 1
    if given.get("steps_per_epoch"):
        given["steps_per_epoch"] = -(-given["steps_per_epoch"] // times)
    weighs = _may_weigh(model) and not given.get("class_weight")  # Keras accepts only one of them
    rows = f"the script's, split over {size} ranks" if times == 1 else f"{size} batches of the script per step"
    with ExitStack() as stack:
        if weighs:
            stack.enter_context(keras_weights.adapt(model))
        if isinstance(x, keras.utils.PyDataset):
            shuffle, given["shuffle"] = given.get("shuffle", True), False
            given["x"] = _PyDatasetPart(x, times=times, shuffle=bool(shuffle), weighs=weighs)
            yield (
                "a PyDataset; "
                + (
                    "batches are distributed over the ranks"
                    if times > 1
                    else "each rank reads every batch and keeps its rows"
                ),
                rows,
            )
        elif hasattr(x, "element_spec") and hasattr(x, "cardinality"):
            given["x"] = hvd.shard(x) if times > 1 else split_tf_data(x, rank=hvd.rank(), size=size, weighs=weighs)
            yield (
                "a tf.data.Dataset; "
                + (
                    "batches are distributed over the ranks" if times > 1 else "each rank keeps its rows of every batch"
                ),
                rows,
            )
        elif _is_torch_loader(x):
            stack.enter_context(x.batch_sampler.forced())
            yield "a torch DataLoader; the rows of each batch are split over the ranks", rows
        elif _is_generator(x):
            raise refuse(
                f"fit() gets a {type(x).__name__}, so every rank would train on the same samples",
                "Pass arrays, a keras.utils.PyDataset, a tf.data.Dataset or a torch DataLoader.",
            )
        else:
            batch = given.pop("batch_size", None) or _FIT_BATCH
            _hold_out(given, batch)
            arrays = [given.pop("x"), given.pop("y", None), given.pop("sample_weight", None)]
            shuffle, given["shuffle"] = given.get("shuffle", True), False  # Keras would shuffle each rank differently
            given["x"] = made = _SplitArrays(arrays, batch * times, shuffle=bool(shuffle), weighs=weighs)
            yield (
                "arrays; the rows of each batch are split over the ranks",
                f"{batch} rows per step, as in the script"
                if times == 1
                else (f"{batch} rows on each rank, {made.batch} per step"),
            )


def _is_torch_loader(x: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.utils.data.DataLoader) and hasattr(x.batch_sampler, "forced")


def _is_generator(x: Any) -> bool:
    """Is this an iterator or iterable of batches without a length?"""
    return hasattr(x, "__next__") or (hasattr(x, "__iter__") and not hasattr(x, "__len__") and not hasattr(x, "shape"))


def _may_weigh(model: Any) -> bool:
    """Can sample weights be added to the batches? Not where the script unpacks batches itself."""
    return type(model).train_step is keras.Model.train_step


def _hold_out(given: dict[str, Any], batch: int) -> None:
    """Apply validation_split before the rows are split: the last samples are not trained on."""
    part = given.pop("validation_split", 0.0)
    given.setdefault("validation_batch_size", batch)
    if not part or given.get("validation_data") is not None:
        return
    names = [name for name in ("x", "y", "sample_weight") if given.get(name) is not None]
    at = int(_length(given["x"]) * (1.0 - part))
    given["validation_data"] = tuple(_rows(given[name], slice(at, None)) for name in names)
    for name in names:
        given[name] = _rows(given[name], slice(0, at))


def _length(data: Any) -> int:
    return len(keras.tree.flatten(data)[0])


def _rows(data: Any, rows: Any) -> Any:
    return keras.tree.map_structure(lambda array: _take(array, rows), data)


def _take(array: Any, rows: Any) -> Any:
    if hasattr(array, "iloc"):  # pandas
        return array.iloc[rows]
    if isinstance(rows, slice) or isinstance(array, np.ndarray):
        return array[rows]
    return keras.ops.convert_to_numpy(array)[rows]


def _weighed(batch: tuple[Any, ...], share: Share, size: int) -> tuple[Any, ...]:
    """Weigh the samples by mean_weight, so that the average over the ranks is the mean over all rows."""
    x, y, given = (*batch, None, None)[:3]
    part = np.full(len(share.rows), 1.0 if share.split else 1.0 / size, np.float32)
    mean = np.full(len(share.rows), share.mean_weight, np.float32)
    own = part if given is None else keras.tree.map_structure(lambda one: np.asarray(one, np.float32) * part[0], given)
    return x, y, keras_weights.pack(own, mean, part)


class _SplitArrays(keras.utils.PyDataset):
    """This rank's rows of each batch of (x, y, sample weights), in an order that is the same on all ranks."""

    def __init__(self, arrays: list[Any], batch: int, *, shuffle: bool, weighs: bool) -> None:
        super().__init__(workers=1, use_multiprocessing=False)
        while arrays and arrays[-1] is None:
            arrays.pop()
        self._arrays = [_pandas_off(one) for one in arrays]
        self._count, self.batch, self._epoch = _length(arrays[0]), batch, 0
        lengths = {len(one) for array in self._arrays for one in keras.tree.flatten(array) if one is not None}
        if len(lengths) > 1:
            raise ValueError(f"fit(): the arrays have different lengths: {sorted(lengths)}.")
        self._rank, self._size = hvd.rank(), hvd.size()
        self._seed = _common_seed() if shuffle else None
        uneven = any(
            one and (one % self._size or not is_split(one, size=self._size, nominal=batch))
            for one in {min(batch, self._count), self._count % batch}
        )
        self._weighs = uneven and weighs and len(self._arrays) > 1
        self._order: Indices = plan_order(self._count, seed=self._seed, epoch=0)

    def __len__(self) -> int:
        return -(-self._count // self.batch)

    def __getitem__(self, index: int) -> Any:
        batch = self._order[index * self.batch : (index + 1) * self.batch]
        share = plan_share(batch, rank=self._rank, size=self._size, nominal=self.batch)
        rows = np.asarray(share.rows, np.int64)
        parts = tuple(None if one is None else _rows(one, rows) for one in self._arrays)
        return _weighed(parts, share, self._size) if self._weighs else parts

    def on_epoch_end(self) -> None:
        self._epoch += 1
        self._order = plan_order(self._count, seed=self._seed, epoch=self._epoch)


def _pandas_off(data: Any) -> Any:
    return (
        data
        if data is None
        else keras.tree.map_structure(lambda one: one.to_numpy() if hasattr(one, "to_numpy") else one, data)
    )


class _PyDatasetPart(keras.utils.PyDataset):
    """This rank's rows of each batch of a PyDataset, or of several batches joined into one."""

    def __init__(self, whole: keras.utils.PyDataset, *, times: int, shuffle: bool, weighs: bool) -> None:
        super().__init__(
            workers=whole.workers,
            use_multiprocessing=whole.use_multiprocessing,
            max_queue_size=whole.max_queue_size,
        )
        self._whole, self._times, self._weighs, self._epoch = whole, times, weighs, 0
        self._rank, self._size, self._seed = hvd.rank(), hvd.size(), _common_seed() if shuffle else None
        self._order: Indices = plan_order(len(whole), seed=self._seed, epoch=0)

    def __len__(self) -> int:
        return joined_length(len(self._order), self._times)

    def __getitem__(self, index: int) -> Any:
        # If several batches make a step, each rank takes one batch; the last few batches are joined and split by rows.
        numbers = self._order[index * self._times : (index + 1) * self._times]
        if len(numbers) == self._size:
            return self._whole[int(numbers[self._rank])]
        batches = [self._whole[int(number)] for number in numbers]
        batch = keras.tree.map_structure(_join, *batches)
        share = plan_share(range(_length(batch)), rank=self._rank, size=self._size)
        rows = slice(share.rows[0], share.rows[-1] + 1)
        part = keras.tree.map_structure(lambda one: None if one is None else one[rows], batch)
        weighs = self._weighs and isinstance(part, tuple) and len(part) > 1
        return _weighed(part, share, self._size) if weighs else part

    def on_epoch_begin(self) -> None:
        self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._whole.on_epoch_end()
        self._epoch += 1
        self._order = plan_order(len(self._whole), seed=self._seed, epoch=self._epoch)


def _join(*arrays: Any) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate([keras.ops.convert_to_numpy(one) for one in arrays])


def _common_seed() -> int:
    seed: int = hvd.broadcast_object(randomness.seed_of({"random": randomness.read_states()["random"]}, 0))
    return seed
