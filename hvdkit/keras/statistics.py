"""Weights that no optimizer trains, such as moving statistics of BatchNormalization: average, or a warning."""

from __future__ import annotations

import keras
import numpy as np

from hvdkit.engine.reduce_op import Average
from hvdkit.keras.sync import GradientSync
from hvdkit.keras.values import allreduce
from hvdkit.log import logger
from hvdkit.strategies.asynchronous import Asynchronous
from hvdkit.strategies.periodic import PeriodicAverage


def average_statistics(sync: GradientSync) -> None:
    """Average the floating-point weights of the optimizer's model that are not trained; collective."""
    weights = [
        weight
        for weight in (sync.model.non_trainable_weights if sync.model is not None else ())
        if "float" in keras.backend.standardize_dtype(weight.dtype)
    ]
    if not weights:
        return
    # In float64 the average of equal float32 numbers is exactly that number.
    values = [np.asarray(keras.ops.convert_to_numpy(weight), np.float64) for weight in weights]
    flat = np.concatenate([value.reshape(-1) for value in values])
    flat = allreduce(flat, "moving statistics", op=Average, process_set=sync.process_set)
    at = 0
    for weight, value in zip(weights, values, strict=True):
        weight.assign(flat[at : at + value.size].reshape(value.shape))
        at += value.size


def warn_of_statistics(model: keras.Model, sync: GradientSync) -> None:
    """Warn if a model that is trained without model= has BatchNormalization, and ranks step independently."""
    if sync.model is not None:
        return
    if isinstance(sync.strategy, PeriodicAverage):
        call, cure = type(sync.strategy).__name__, "synchronize_parameters"
    elif isinstance(sync.strategy, Asynchronous):
        call, cure = "AsynchronousOptimizer", "finish"
    else:
        return
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers()):
        logger.warning(
            "hvd.%s: the model has BatchNormalization, whose moving statistics are of each rank's own batches. Pass "
            "model=model, so that optimizer.%s() averages them, or use layers without moving statistics "
            "(GroupNormalization, LayerNormalization).",
            call,
            cure,
        )
