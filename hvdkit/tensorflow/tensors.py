"""Conversion of TensorFlow's tensors to the engine's dtypes and memory, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.transport.buffer import FLOAT8, STORAGE, Array, Buffer

_ALIGN = 64  # bytes; TensorFlow uses memory in place if its address is a multiple of this, and copies it otherwise


def _named(name: str) -> Any:
    try:
        return tf.as_dtype(name)
    except TypeError:
        return None


#: TensorFlow's dtype -> the engine's name, of the sendable dtypes that this TensorFlow has.
NAMES: dict[Any, str] = {dtype: name for name in STORAGE if (dtype := _named(name)) is not None}
_NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(dtype.as_numpy_dtype) for dtype, name in NAMES.items()}


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype (TensorFlow's, or its name); TypeError if it cannot be sent."""
    try:
        return NAMES[tf.as_dtype(dtype).base_dtype]  # also of a reference, which old variables of graphs have
    except KeyError:
        raise TypeError(
            f"{tf.as_dtype(dtype).name} cannot be sent between ranks. Cast the tensor to one of "
            f"{', '.join(NAMES.values())}."
        ) from None


def array_of(tensor: Any) -> Array:
    """Return an eager tensor's values; of a tensor in host memory its own memory, which must not be written."""
    made: Array = tensor.__array__()
    return made


def flat_storage(array: Array, name: str) -> Array:
    """View an array of any shape as (n,) in the dtype's storage; sharing memory if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(STORAGE[name])


def as_buffer(array: Array, name: str) -> Buffer:
    """View an array of TensorFlow's as a Buffer (n,)."""
    return Buffer(flat_storage(array, name), name)


def aligned_array(shape: Sequence[int], name: str) -> Array:
    """Allocate an array that TensorFlow can use without a copy; its values are arbitrary."""
    itemsize = STORAGE[name].itemsize
    count = int(np.prod(shape, dtype=np.int64))
    memory = np.empty(count * itemsize + _ALIGN, np.uint8)
    start = -memory.ctypes.data % _ALIGN
    return memory[start : start + count * itemsize].view(_NUMPY[name]).reshape(tuple(shape))


def empty_tensor(shape: Sequence[int], name: str) -> Any:
    """Allocate a tensor for a function to fill before it is read; its values are arbitrary.

    The memory is TensorFlow's own, which reuses it for other tensors, and does not return it to malloc.
    """
    with tf.device("CPU:0"):
        return tf.raw_ops.Empty(shape=tuple(shape), dtype=_NUMPY[name], init=False)


def as_tensor(array: Array, name: str) -> Any:
    """Return an eager tensor in the memory of an array, which it keeps alive and which must not be written any more.

    A copy if TensorFlow cannot use the memory, and for float8.
    """
    if array.ctypes.data % _ALIGN or not array.size or name in FLOAT8:
        return tf.convert_to_tensor(array)
    if name != "bfloat16":
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    bits = tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__())
    return tf.bitcast(bits, tf.bfloat16)


def shaped(buffer: Buffer, shape: Sequence[int]) -> Array:
    """View a Buffer as an array of TensorFlow's, of this shape."""
    return buffer.array.view(_NUMPY[buffer.dtype]).reshape(tuple(shape))


def copy_of(array: Array, name: str) -> Array:
    """Copy the values to new memory, which TensorFlow can use without a copy."""
    made = aligned_array(array.shape, name)
    made[...] = array
    return made
