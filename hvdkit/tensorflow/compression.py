"""Horovod's module of compressors, and the casts of TensorFlow's tensors that they use."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.engine.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    register_casts,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "clamp"]


def clamp(tensor: Any, largest: Any) -> Any:
    """Limit finite values to -largest and largest; infinities and NaN stay."""
    limit = tf.constant(float(largest), tensor.dtype)
    return tf.where(tf.math.is_inf(tensor), tensor, tf.clip_by_value(tensor, -limit, limit))


class _TensorflowCasts:
    """See Casts."""

    def owns(self, tensor: Any) -> bool:
        return isinstance(tensor, tf.Variable) or bool(tf.is_tensor(tensor))

    def dtype_of(self, tensor: Any) -> str:
        return str(tf.as_dtype(tensor.dtype).name)

    def clamp(self, tensor: Any, limit: float) -> Any:
        return clamp(tensor, limit)

    def cast(self, tensor: Any, dtype: str) -> Any:
        return tf.cast(tensor, dtype)


register_casts(_TensorflowCasts())
