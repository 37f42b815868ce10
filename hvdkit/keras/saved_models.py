"""load_model: loads saved models with a wrapped optimizer, even while the file is still being written."""

from __future__ import annotations

import importlib
import os
import time
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdkit.keras.compression import Compression, Compressor
from hvdkit.keras.h5_models import load_h5_model
from hvdkit.keras.optimizer import DistributedOptimizer
from hvdkit.log import logger

#: Seconds for which an incomplete file may stay unchanged before it is taken for broken.
PATIENCE_S = 60.0
_PAUSE_S = 0.05
_HDF5 = (".h5", ".hdf5")


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model that was saved with or without hvdkit, and wrap its optimizer with DistributedOptimizer().

    filepath: as for keras.saving.load_model(). `.h5` files of Keras 2 are accepted too, if Keras 3 has the layers that
    they contain. If another rank or process is still writing the file, load_model() waits until it is complete, as long
    as the file changes at least once per minute.
    custom_optimizers: optimizer classes that are not part of Keras.
    custom_objects: as for keras.saving.load_model().
    compression: as for DistributedOptimizer().
    legacy_opts: accepted as in Horovod, and ignored.

    Raises what keras.saving.load_model() raises; OSError for an incomplete file that does not change any more;
    ValueError for an `.h5` file whose optimizer state does not match the model.
    """
    objects = {**{kind.__name__: kind for kind in custom_optimizers or ()}, **(custom_objects or {})}
    name = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    wait_until_whole(name if os.path.exists(name) else f"{name}.keras")  # --alias-horovod adds the suffix
    load = load_h5_model if name.endswith(_HDF5) else keras.saving.load_model
    model: keras.Model = load(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def wait_until_whole(path: str) -> None:
    """Wait while a zip (`.keras`) or HDF5 (`.h5`, `.hdf5`) file, recognized by its name, is incomplete.

    Returns at once for a path that does not exist, is not a file, or has another name: loading it reports the error.
    Raises OSError when the file has not changed for PATIENCE_S.
    """
    seen, since, said = _stamp(path), time.monotonic(), False
    while problem := _what_is_missing(path):
        if not said:
            logger.info("load_model() waits until %s is completely written: %s.", path, problem)
            said = True
        time.sleep(_PAUSE_S)
        stamp = _stamp(path)
        if stamp != seen:
            seen, since = stamp, time.monotonic()
        elif time.monotonic() - since > PATIENCE_S:
            raise OSError(
                f"load_model(): {path} ({seen[0]} bytes) is incomplete and has not changed for {PATIENCE_S:.0f} s: "
                f"{problem}. If another rank writes the file, call hvd.barrier() on all ranks between saving and "
                f"loading. If the process that wrote it was ended, load an earlier checkpoint."
            )


def _stamp(path: str) -> tuple[int, int]:
    """Return size and modification time of a file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _what_is_missing(path: str) -> str:
    """Return why a file cannot be read yet; "" if it can be read, or never will be."""
    if not os.path.isfile(path):
        return ""
    if path.endswith(".keras"):
        return "" if zipfile.is_zipfile(path) else "the zip directory at the end of the file is missing"
    if not path.endswith(_HDF5):
        return ""
    try:
        importlib.import_module("h5py").File(path, "r").close()
    except PermissionError:
        return ""
    except OSError as error:  # locked by its writer, empty, or truncated
        return str(error)
    return ""
