"""Losses: `Reduction` with its AUTO, which was what a sum over the batch's size is now."""

from __future__ import annotations

import importlib
from types import ModuleType


def apply(keras: ModuleType) -> None:
    """Put it back, in the losses of `keras` and of `tf.keras` alike."""
    kind = importlib.import_module("keras.src.legacy.losses").Reduction
    kind.AUTO = kind.SUM_OVER_BATCH_SIZE
    keras.losses.Reduction = kind
