"""Losses and metrics: `Reduction` with AUTO, and functions under all their names.

AUTO is now SUM_OVER_BATCH_SIZE. Keras 3 has kept some of the names in `keras`, others in `tf.keras`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

#: Each line has the names of one function, in `losses` and in `metrics`.
_NAMES = (
    "mean_squared_error mse MSE",
    "mean_absolute_error mae MAE",
    "mean_absolute_percentage_error mape MAPE",
    "mean_squared_logarithmic_error msle MSLE",
    "kl_divergence kld KLD kullback_leibler_divergence",
    "log_cosh logcosh",
)
#: Names in `losses` only: as a metric this was positive in some versions of Keras 2.
_NAMES_OF_LOSSES = ("cosine_similarity cosine_proximity cosine",)


def apply(keras: ModuleType) -> None:
    """Restore Reduction in the losses of `keras` and of `tf.keras`."""
    kind = importlib.import_module("keras.src.legacy.losses").Reduction
    kind.AUTO = kind.SUM_OVER_BATCH_SIZE
    keras.losses.Reduction = kind


def apply_to_functions(module: ModuleType) -> None:
    """Add each function of `losses` or `metrics` under all its names."""
    for group in (*_NAMES, *(_NAMES_OF_LOSSES if module.__name__.endswith("losses") else ())):
        names = group.split()
        found = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        for name in names:
            if found is not None and not hasattr(module, name):
                setattr(module, name, found)
