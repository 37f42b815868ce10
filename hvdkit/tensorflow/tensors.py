"""TensorFlow's tensors as the engine's numbers: dtypes and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.transport.buffer import FLOAT8, STORAGE, Array, Buffer

_ALIGN = 64  # bytes; TensorFlow uses memory as it is where it begins at such an address, and copies it elsewhere


def _named(name: str) -> Any:
    try:
        return tf.as_dtype(name)
    except TypeError:
        return None


#: TensorFlow's dtype -> the engine's name, of those that travel and that this TensorFlow has.
NAMES: dict[Any, str] = {dtype: name for name in STORAGE if (dtype := _named(name)) is not None}
_NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(dtype.as_numpy_dtype) for dtype, name in NAMES.items()}


def dtype_name(dtype: Any) -> str:
    """The name of a dtype (TensorFlow's, or in its words) among those that travel; TypeError for another one."""
    try:
        return NAMES[tf.as_dtype(dtype).base_dtype]  # of a reference, as old variables of graphs have it, too
    except KeyError:
        raise TypeError(
            f"{tf.as_dtype(dtype).name} cannot be sent between ranks. Cast the tensor to one of "
            f"{', '.join(NAMES.values())}."
        ) from None


def array_of(tensor: Any) -> Array:
    """An eager tensor's numbers; of one in host memory they are its memory, not to be written to."""
    made: Array = tensor.__array__()
    return made


def flat_storage(array: Array, name: str) -> Array:
    """See an array of any shape as (n,) in the dtype's storage; sharing memory if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(STORAGE[name])


def as_buffer(array: Array, name: str) -> Buffer:
    """See an array of TensorFlow's as a Buffer (n,)."""
    return Buffer(flat_storage(array, name), name)


def aligned_array(shape: Sequence[int], name: str) -> Array:
    """A new array that TensorFlow can use without a copy; its numbers are arbitrary."""
    itemsize = STORAGE[name].itemsize
    count = int(np.prod(shape, dtype=np.int64))
    memory = np.empty(count * itemsize + _ALIGN, np.uint8)
    start = -memory.ctypes.data % _ALIGN
    return memory[start : start + count * itemsize].view(_NUMPY[name]).reshape(tuple(shape))


def empty_tensor(shape: Sequence[int], name: str) -> Any:
    """A tensor for a function to fill, before anything else reads it; its numbers are arbitrary.

    It is in memory of TensorFlow's own, which uses it for other tensors afterwards, and keeps what malloc gives it.
    """
    with tf.device("CPU:0"):
        return tf.raw_ops.Empty(shape=tuple(shape), dtype=_NUMPY[name], init=False)


def as_tensor(array: Array, name: str) -> Any:
    """An eager tensor in the memory of an array, which it keeps alive; nobody writes to it from then on.

    A copy, where TensorFlow cannot use the memory, and of float8.
    """
    if array.ctypes.data % _ALIGN or not array.size or name in FLOAT8:
        return tf.convert_to_tensor(array)
    if name != "bfloat16":
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    bits = tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__())
    return tf.bitcast(bits, tf.bfloat16)


def shaped(buffer: Buffer, shape: Sequence[int]) -> Array:
    """See a Buffer as an array of TensorFlow's, of this shape."""
    return buffer.array.view(_NUMPY[buffer.dtype]).reshape(tuple(shape))


def copy_of(array: Array, name: str) -> Array:
    """The same numbers in memory of their own, which TensorFlow can use without a copy."""
    made = aligned_array(array.shape, name)
    made[...] = array
    return made
