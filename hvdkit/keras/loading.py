"""Recording of the time that fit() waits for data, for profiles; loaded together with the backend."""

from __future__ import annotations

import functools
import importlib

import keras

from hvdkit.profiling.loading import time_items


@functools.cache
def watch_fit() -> None:
    """Count each batch as waiting for data, for all kinds of arguments of fit()."""
    name = keras.backend.backend()
    if name == "torch":
        importlib.import_module("hvdkit.torch.loading").watch_loaders()
    elif name == "tensorflow":
        importlib.import_module("hvdkit.tensorflow.loading").watch_datasets()
    elif name == "jax":
        time_items(importlib.import_module("keras.src.backend.jax.trainer").JAXEpochIterator, "_get_iterator")
