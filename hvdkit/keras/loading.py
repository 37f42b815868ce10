"""While steps are recorded: how long training waits for data, on the backend that Keras runs on."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from hvdkit.engine.observe.recording import RECORDER, clock


@functools.cache
def watch_fit() -> None:
    """Note the time that each batch takes, whatever fit() is given."""
    name = keras.backend.backend()
    if name == "torch":
        importlib.import_module("hvdkit.torch.loading").watch_loaders()
    elif name == "tensorflow":
        importlib.import_module("hvdkit.tensorflow.loading").watch_datasets()
    elif name == "jax":
        _watch_jax(importlib.import_module("keras.src.backend.jax.trainer").JAXEpochIterator)


def _watch_jax(epoch: Any) -> None:
    get = epoch._get_iterator

    def _get_iterator(self: Any) -> Iterator[Any]:
        return _timed(get(self))

    epoch._get_iterator = _get_iterator


def _timed(batches: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(batches)
    while True:
        began = clock()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        finally:
            RECORDER.loading(began, clock())
        yield batch
