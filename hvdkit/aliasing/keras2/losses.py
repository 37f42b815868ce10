"""Losses and metrics: `Reduction` with its AUTO, and functions under all of their names.

AUTO was what a sum over the batch's size is now. Of the names Keras 3 has left some to `keras`, others to `tf.keras`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

#: Names of one function each, in `losses` and in `metrics`.
_NAMES = (
    "mean_squared_error mse MSE",
    "mean_absolute_error mae MAE",
    "mean_absolute_percentage_error mape MAPE",
    "mean_squared_logarithmic_error msle MSLE",
    "kl_divergence kld KLD kullback_leibler_divergence",
    "log_cosh logcosh",
)
#: As a metric this was positive in some versions of Keras 2.
_NAMES_OF_LOSSES = ("cosine_similarity cosine_proximity cosine",)


def apply(keras: ModuleType) -> None:
    """Put it back, in the losses of `keras` and of `tf.keras` alike."""
    kind = importlib.import_module("keras.src.legacy.losses").Reduction
    kind.AUTO = kind.SUM_OVER_BATCH_SIZE
    keras.losses.Reduction = kind


def apply_to_functions(module: ModuleType) -> None:
    """Give `losses` or `metrics` each function under all its names."""
    for group in (*_NAMES, *(_NAMES_OF_LOSSES if module.__name__.endswith("losses") else ())):
        names = group.split()
        found = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        for name in names:
            if found is not None and not hasattr(module, name):
                setattr(module, name, found)
