"""Conversion of Keras models and their values to bytes."""

from __future__ import annotations

import io
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np

from hvdkit_spark.common.model import Predict


def dump_model(model: keras.Model) -> bytes:
    """Return the `.keras` file of a model."""
    with tempfile.TemporaryDirectory(prefix="hvdkit-") as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        return path.read_bytes()


def load_model(data: bytes, custom_objects: Mapping[str, Any] | None) -> keras.Model:
    """Load the model of a `.keras` file, not compiled."""
    with tempfile.TemporaryDirectory(prefix="hvdkit-") as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(data)
        return keras.saving.load_model(path, custom_objects=dict(custom_objects or {}), compile=False)


def dump_values(**variables: Any) -> bytes:
    """Pickle the values of lists of variables, by name."""
    file = io.BytesIO()
    arrays = {
        f"{name}.{at:05d}": keras.ops.convert_to_numpy(variable)
        for name, these in variables.items()
        for at, variable in enumerate(these)
    }
    np.savez(file, **arrays)
    return file.getvalue()


def load_values(data: bytes, **variables: Any) -> None:
    """Assign the values that dump_values() has written."""
    with np.load(io.BytesIO(data)) as arrays:
        for name, these in variables.items():
            for at, variable in enumerate(these):
                variable.assign(arrays[f"{name}.{at:05d}"])


def dump_objects(objects: dict[str, Any]) -> bytes:
    """Pickle parameters; `model` becomes its `.keras` file."""
    model = objects.get("model")
    found = {**objects, "model": dump_model(model)} if model is not None else objects
    return bytes(cloudpickle.dumps(found))


def load_objects(data: bytes) -> dict[str, Any]:
    """Load the parameters that dump_objects() has written."""
    objects: dict[str, Any] = pickle.loads(data)
    if objects.get("model") is not None:
        objects["model"] = load_model(objects["model"], objects.get("custom_objects"))
    return objects


def make_predict(data: bytes) -> Predict:
    """Make the function that predicts with the model of dump_objects()."""
    model = load_objects(data)["model"]

    def predict(inputs: list[Any]) -> list[Any]:
        outputs = model.predict_on_batch(inputs if len(inputs) > 1 else inputs[0])
        return list(outputs) if isinstance(outputs, list | tuple) else [outputs]

    return predict
