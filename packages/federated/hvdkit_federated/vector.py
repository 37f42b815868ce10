"""Conversion of a model's arrays to one vector of float64, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit_federated.errors import FederatedError

Vector = NDArray[np.float64]
Arrays = Sequence[NDArray[Any]]


def flatten(arrays: Arrays) -> Vector:
    """Concatenate the arrays to (n,), as float64."""
    if not arrays:
        return np.empty(0, np.float64)
    return np.concatenate([np.asarray(array, np.float64).reshape(-1) for array in arrays])


def unflatten(vector: Vector, like: Arrays) -> list[NDArray[Any]]:
    """Cut the vector (n,) into arrays of these shapes and dtypes."""
    ends = np.cumsum([array.size for array in like])[:-1]
    pieces = np.split(vector, ends)
    return [piece.reshape(one.shape).astype(one.dtype) for piece, one in zip(pieces, like, strict=True)]


def check_weights(weights: Any, call: str) -> list[NDArray[Any]]:
    """Return the weights as a list of numpy arrays; FederatedError for anything but finite floating-point arrays."""
    if isinstance(weights, np.ndarray) or not isinstance(weights, Sequence) or not weights:
        raise FederatedError(
            f"{call}: the weights are a {type(weights).__name__}, but must be a list of one or more numpy arrays. "
            "federated.get_weights(model) makes it from a torch module or a Keras model."
        )
    arrays = [np.asarray(array) for array in weights]
    for at, array in enumerate(arrays):
        if array.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
            raise FederatedError(
                f"{call}: array {at} of the weights has dtype {array.dtype}, which has no average. Leave it out, or "
                "cast it to float32."
            )
        if not np.isfinite(np.asarray(array, np.float64)).all():
            raise FederatedError(f"{call}: array {at} of the weights, of shape {array.shape}, has a NaN or infinity.")
    return arrays


def digest(arrays: Arrays) -> str:
    """Return a checksum of shapes, dtypes and numbers, for comparing ranks."""
    seen = hashlib.blake2b(digest_size=16)
    for array in arrays:
        seen.update(f"{array.dtype.name}{array.shape}".encode())
        seen.update(np.ascontiguousarray(array).tobytes())
    return seen.hexdigest()
