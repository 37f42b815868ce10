"""Where fit() waits for data, on the backend that Keras runs on; loaded with that backend only, for the profile."""

from __future__ import annotations

import functools
import importlib

import keras

from hvdkit.profiling.loading import time_items


@functools.cache
def watch_fit() -> None:
    """Have each batch count as waiting for data, whatever fit() is given."""
    name = keras.backend.backend()
    if name == "torch":
        importlib.import_module("hvdkit.torch.loading").watch_loaders()
    elif name == "tensorflow":
        importlib.import_module("hvdkit.tensorflow.loading").watch_datasets()
    elif name == "jax":
        time_items(importlib.import_module("keras.src.backend.jax.trainer").JAXEpochIterator, "_get_iterator")
