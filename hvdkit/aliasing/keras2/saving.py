"""Accept file names that Keras 3 refuses: `.h5` is written in Keras 2's format; a missing extension is added."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvdkit.aliasing.said import warn_once

_OLD = (".h5", ".hdf5", ".hdf", ".keras_weights")
_WEIGHTS = ".weights.h5"


def apply(keras: ModuleType) -> None:
    """Patch models and ModelCheckpoint to accept these names."""
    model = keras.Model
    model.save_weights = _save_weights(model.save_weights)
    model.load_weights = _load_weights(model.load_weights)
    model.save = _save(model.save)
    _patch_checkpoint(keras.callbacks.ModelCheckpoint)


def apply_to_loader(module: ModuleType) -> None:
    """Patch load_model of `models` or `saving` to find the names that save() has written."""
    if not hasattr(module.load_model, "__wrapped__"):
        module.load_model = _load_model(module.load_model)  # type: ignore[attr-defined]


def _is_old_weights(path: str) -> bool:
    return path.endswith(_OLD) and not path.endswith(_WEIGHTS)


def _save_weights(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def save_weights(self: Any, filepath: Any, overwrite: bool = True, **kwargs: Any) -> Any:
        path = os.fspath(filepath)
        if kwargs.pop("save_format", None) or kwargs.pop("options", None):
            warn_once("save_weights(save_format=...) was removed in Keras 3; the extension of the file name decides.")
        if path.endswith((_WEIGHTS, ".json")):
            return own(self, path, overwrite=overwrite, **kwargs)
        if not _is_old_weights(path):
            warn_once(
                f"save_weights({path!r}): Keras 3 does not write TensorFlow checkpoints; hvdkit writes "
                f"{path}{_WEIGHTS} instead."
            )
            return own(self, path + _WEIGHTS, overwrite=overwrite, **kwargs)
        warn_once(
            f"save_weights({path!r}): Keras 3 requires the extension {_WEIGHTS}; hvdkit writes the file in the format "
            f"of Keras 2."
        )
        h5py = importlib.import_module("h5py")
        form = importlib.import_module("keras.src.legacy.saving.legacy_h5_format")
        with h5py.File(path, "w") as file:
            form.save_weights_to_hdf5_group(file, self)
        return None

    return save_weights


def _load_weights(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def load_weights(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.fspath(filepath)
        if not os.path.exists(path) and os.path.exists(path + _WEIGHTS):
            path += _WEIGHTS
        if path.endswith(_OLD[1:]):
            return _load_old(self, path)
        return own(self, path, *args, **kwargs)

    return load_weights


def _load_old(model: Any, path: str) -> None:
    h5py = importlib.import_module("h5py")
    form = importlib.import_module("keras.src.legacy.saving.legacy_h5_format")
    with h5py.File(path, "r") as file:
        form.load_weights_from_hdf5_group(file.get("model_weights", file), model)


def _save(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def save(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.fspath(filepath)
        kind = kwargs.pop("save_format", None)
        if kind is not None:
            warn_once("save(save_format=...) was removed in Keras 3; the extension of the file name decides.")
        if not path.endswith((".keras", *_OLD)):
            warn_once(
                f"save({path!r}): Keras 3 does not write a SavedModel; hvdkit writes {path.rstrip('/')}.keras instead."
            )
            path = f"{path.rstrip('/')}.keras"
        return own(self, path, *args, **kwargs)

    return save


def _load_model(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def load_model(filepath: Any, custom_objects: Any = None, compile: bool = True, **kwargs: Any) -> Any:
        path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else filepath
        if isinstance(path, str) and not os.path.exists(path) and os.path.exists(f"{path.rstrip('/')}.keras"):
            path = f"{path.rstrip('/')}.keras"
        if compile and isinstance(path, str) and path.endswith((".h5", ".hdf5")):
            return importlib.import_module("hvdkit.keras.h5_models").load_h5_model(path, custom_objects, **kwargs)
        return own(path, custom_objects=custom_objects, compile=compile, **kwargs)

    return load_model


def _patch_checkpoint(kind: Any) -> None:
    own, own_epoch_end = kind.__init__, kind.on_epoch_end

    def __init__(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        path = os.fspath(filepath)
        period = int(kwargs.pop("period", None) or 1)
        only = kwargs.get("save_weights_only", args[3] if len(args) > 3 else False)
        allowed = path.endswith(_WEIGHTS) if only else path.endswith((".keras", ".h5"))
        if allowed:
            own(self, path, *args, **kwargs)
        else:
            own(self, f"unset{_WEIGHTS}" if only else "unset.keras", *args, **kwargs)
            self.filepath = path if only or path.endswith(_OLD) else f"{path}.keras"
        self._hvdkit_period = period
        if period > 1:
            warn_once(f"ModelCheckpoint(period=...) was removed in Keras 3; hvdkit still saves every {period} epochs.")

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        if (epoch + 1) % getattr(self, "_hvdkit_period", 1) == 0:
            own_epoch_end(self, epoch, logs)

    kind.__init__, kind.on_epoch_end = __init__, on_epoch_end
