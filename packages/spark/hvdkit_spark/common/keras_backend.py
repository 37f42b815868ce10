"""Keras in a Python worker of Spark, on the backend of the driver. Not in spark/keras, which imports Keras."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def make_keras_predict(backend: str, data: bytes) -> Callable[[list[Any]], list[Any]]:
    """Predict with a pickled model; see keras/estimator.py.

    backend: the backend of Keras, unless the executor itself sets KERAS_BACKEND.
    """
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", backend)
    predict: Callable[[list[Any]], list[Any]] = importlib.import_module("hvdkit_spark.keras.models").make_predict(data)
    return predict
