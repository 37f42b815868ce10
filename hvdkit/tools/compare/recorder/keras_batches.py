"""The data of fit(), of any type, as batches that are recorded or come from the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from threading import Lock
from typing import Any

import keras
from keras.src.trainers import data_adapters

from hvdkit.tools.compare.recorder.session import Key, Session


def find_adapter(make: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Return Keras's data adapter for the arguments of an EpochIterator, and the arguments by name."""
    given = inspect.signature(make).bind(*args, **kwargs)
    given.apply_defaults()
    rest = dict(given.arguments)
    names = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "class_weight")
    return data_adapters.get_data_adapter(**{name: rest[name] for name in names}), rest


class Batches(keras.utils.PyDataset):
    """An epoch's batches by number; drawn on demand, and kept until the next epoch."""

    def __init__(self, adapter: Any, session: Session, number: int, steps: int | None) -> None:
        super().__init__()
        self._adapter, self._session, self._number = adapter, session, number
        self._length = _count(session, number) or steps or adapter.num_batches
        self._epoch = -1
        self._drawn: list[Any] = []
        self._source: Iterator[Any] = iter(())
        self._endless = steps is not None
        self._lock = Lock()
        self.on_epoch_begin()

    def __len__(self) -> int:
        if not self._length:
            raise TypeError("hvdkit compare: the data of fit() has no known length. Pass steps_per_epoch to fit().")
        return int(self._length)

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            keys = self._session.batches(self._number, self._epoch)
            if keys:
                return self._session.joined(keys[min(index, len(keys) - 1)])  # what is beyond is fetched, never used
            while len(self._drawn) <= index:
                self._drawn.append(next(self._source))
            return self._drawn[index]

    def on_epoch_begin(self) -> None:
        """Start the next epoch; data without an end continues."""
        with self._lock:
            self._epoch += 1
            self._drawn = []
            if self._epoch and not self._endless:
                self._adapter.on_epoch_end()
            if not self._epoch or not self._endless:
                self._adapter.on_epoch_begin()
                self._source = iter(self._adapter.get_numpy_iterator())

    def given(self, index: int) -> tuple[Key, Any]:
        """Return a batch of this epoch by number, and its key."""
        return (self._number, self._epoch, index), self[index]


def _count(session: Session, number: int) -> int:
    """Return how many batches the ranks trained on in one epoch, if one rank takes those; 0 otherwise."""
    keys = [key for key in session.given if key[0] == number]
    return 1 + max((key[2] for key in keys), default=-1)
