"""Horovod's module of compressors, and the casts of Keras's tensors that they use."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdkit.engine.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    register_casts,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _KerasCasts:
    """See Casts: for the backend's tensors and for numpy's arrays."""

    def owns(self, tensor: Any) -> bool:
        return _is_numpy(tensor) or isinstance(tensor, keras.Variable) or bool(keras.ops.is_tensor(tensor))

    def dtype_of(self, tensor: Any) -> str:
        return str(tensor.dtype if _is_numpy(tensor) else keras.backend.standardize_dtype(tensor.dtype))

    def clamp(self, tensor: Any, limit: float) -> Any:
        ops: Any = np if _is_numpy(tensor) else keras.ops
        return ops.where(ops.isinf(tensor), tensor, ops.clip(tensor, -limit, limit))

    def cast(self, tensor: Any, dtype: str) -> Any:
        return tensor.astype(dtype) if _is_numpy(tensor) else keras.ops.cast(tensor, dtype)


def _is_numpy(tensor: Any) -> bool:
    return isinstance(tensor, (np.ndarray, np.generic))


register_casts(_KerasCasts())
