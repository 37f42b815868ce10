"""Make Keras 3 accept code for Keras 2, where that is safe, while a script runs under the alias.

Experimental: it patches modules and classes of Keras, so that a new release of Keras may break it.
"""

from __future__ import annotations

from types import ModuleType

from hvdkit.aliasing.keras2 import (
    backend,
    callbacks,
    data,
    lambda_layers,
    learning_rate,
    losses,
    models,
    optimizers,
    saving,
)
from hvdkit.aliasing.keras2.modules import FINDER, add_old_layers, add_old_modules, parents
from hvdkit.aliasing.keras2.roots import ROOTS
from hvdkit.startup.after_import import after_import

__all__ = ["FINDER", "apply", "learning_rate"]


def apply(keras: ModuleType) -> None:
    """Patch Keras 3 to accept code for Keras 2; Keras 2 is left unchanged."""
    if not keras.__version__.startswith("3."):
        return
    optimizers.apply(keras)
    models.apply(keras)
    saving.apply(keras)
    callbacks.apply(keras)
    data.apply(keras)
    losses.apply(keras)
    lambda_layers.apply(keras)
    for root in ROOTS:
        after_import(f"{root}.backend", backend.apply)
        after_import(f"{root}.optimizers.legacy", optimizers.apply_to_legacy)
        after_import(f"{root}.utils", backend.apply_to_utils)
        after_import(f"{root}.preprocessing", backend.apply_to_preprocessing)
        after_import(f"{root}.preprocessing.image", backend.apply_to_image)
        after_import(f"{root}.layers", add_old_layers)
        after_import(f"{root}.losses", losses.apply_to_functions)
        after_import(f"{root}.metrics", losses.apply_to_functions)
        after_import(f"{root}.models", saving.apply_to_loader)
        after_import(f"{root}.saving", saving.apply_to_loader)
        for parent in parents():
            after_import(f"{root}.{parent}" if parent else root, add_old_modules)
