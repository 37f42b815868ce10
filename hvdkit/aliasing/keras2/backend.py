"""Restore functions of keras.backend and keras.preprocessing that Keras 3 has only in tf.keras."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from hvdkit.aliasing import tensorflow1
from hvdkit.aliasing.said import warn_once

_OLD = "keras._tf_keras.keras"


def apply(backend: ModuleType) -> None:
    """Restore functions of keras.backend: those that tf.keras still has, and a few that neither has."""
    for name, function in _FUNCTIONS.items():
        setattr(backend, name, function)
    if backend.__name__ == "keras.backend":
        _look_further(backend, f"{_OLD}.backend")


def apply_to_preprocessing(preprocessing: ModuleType) -> None:
    """Restore keras.preprocessing.sequence and .text."""
    if preprocessing.__name__ == "keras.preprocessing":
        _look_further(preprocessing, f"{_OLD}.preprocessing")


def apply_to_image(image: ModuleType) -> None:
    """Restore keras.preprocessing.image.ImageDataGenerator and similar names."""
    if image.__name__ == "keras.preprocessing.image":
        _look_further(image, f"{_OLD}.preprocessing.image")


def apply_to_utils(utils: ModuleType) -> None:
    """Make keras.utils.multi_gpu_model raise ImportError: it has no replacement."""
    utils.multi_gpu_model = _multi_gpu_model  # type: ignore[attr-defined]


def _multi_gpu_model(*_: Any, **__: Any) -> NoReturn:
    raise ImportError(
        "keras.utils.multi_gpu_model was removed in Keras 3. Remove the call; hvdrun starts one rank per GPU."
    )


def _look_further(module: ModuleType, further: str) -> None:
    own: Callable[[str], Any] | None = vars(module).get("__getattr__")

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if own is not None:
            try:
                return own(name)
            except AttributeError:
                pass
        try:
            found = getattr(importlib.import_module(further), name, None)
        except ImportError:  # TensorFlow is not installed
            found = None
        if found is None:
            raise AttributeError(
                f"{module.__name__} has no {name!r}, neither in Keras 3 nor in its compatibility modules for Keras 2"
            )
        warn_once(f"Keras 3 has {module.__name__}.{name} only in tf.keras; hvdkit uses that one.")
        return found

    module.__getattr__ = find  # type: ignore[method-assign]


def _get_value(x: Any) -> Any:
    """Return the value as a numpy array."""
    return x.numpy() if hasattr(x, "numpy") else x


def _set_value(x: Any, value: Any) -> None:
    """Assign to a variable."""
    x.assign(value)


def _learning_phase() -> int:
    warn_once("K.learning_phase() was removed in Keras 3; it returns 0. Write model(x, training=True).")
    return 0


def _set_learning_phase(value: Any) -> None:
    warn_once(f"K.set_learning_phase({value}) was removed in Keras 3 and does nothing. Write model(x, training=...).")


def _image_dim_ordering() -> str:
    keras = importlib.import_module("keras")
    return "tf" if keras.config.image_data_format() == "channels_last" else "th"


def _set_image_dim_ordering(order: str) -> None:
    keras = importlib.import_module("keras")
    keras.config.set_image_data_format({"tf": "channels_last", "th": "channels_first"}[order])


def _manual_variable_initialization(value: Any) -> None:
    warn_once("K.manual_variable_initialization() was removed in Keras 3 and does nothing. Remove the call.")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "get_value": _get_value,
    "set_value": _set_value,
    "batch_get_value": lambda tensors: [_get_value(one) for one in tensors],
    "set_session": tensorflow1.set_session,
    "get_session": tensorflow1.get_session,
    "learning_phase": _learning_phase,
    "set_learning_phase": _set_learning_phase,
    "image_dim_ordering": _image_dim_ordering,
    "set_image_dim_ordering": _set_image_dim_ordering,
    "manual_variable_initialization": _manual_variable_initialization,
}
