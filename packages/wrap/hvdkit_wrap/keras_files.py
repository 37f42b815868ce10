"""Save Keras models on rank 0 only; a rank that loads a model waits until rank 0 has written it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

import hvdkit.keras as hvd
from hvdkit_wrap.keras_fit import fitting
from hvdkit_wrap.session import active, current


def watch() -> None:
    """Patch the functions that read and write models."""
    for name in ("save", "save_weights", "export"):
        setattr(keras.Model, name, _on_rank_zero(getattr(keras.Model, name)))
    keras.Model.load_weights = _after_the_others(keras.Model.load_weights)
    for module in (keras.saving, keras.models):
        module.save_model = _on_rank_zero(module.save_model)
        module.load_model = _after_the_others(module.load_model)


def _on_rank_zero(plain: Callable[..., Any]) -> Callable[..., Any]:
    def saving(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if not active() or current().first else None

    return saving


def _after_the_others(plain: Callable[..., Any]) -> Callable[..., Any]:
    def loading(*args: Any, **kwargs: Any) -> Any:
        if active() and hvd.is_initialized() and not fitting():
            hvd.barrier()  # rank 0 enters the barrier only after it has written the file
        return plain(*args, **kwargs)

    return loading
