"""The tensors of a TensorSource as numpy arrays; float16 and bfloat16 are converted to float32."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from hvdkit.engine.planned.plan import Bucket, Plan, Slot, TensorSpec
from hvdkit.engine.planned.source import TensorSource
from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.buffer import HALF, STORAGE, Array, Buffer, make_buffer

_arithmetic = NumpyArithmetic()


def math_dtype(dtype: str) -> str:
    """Return the dtype in which a strategy computes with values of this dtype."""
    return "float32" if dtype in HALF else dtype


class ParameterValues:
    """Reads and writes single tensors of a source. Gives the source a plan of its own.

    unused: the tensors that this rank did not use at their last read().
    """

    def __init__(self, tensors: Sequence[TensorSpec], source: TensorSource) -> None:
        self._tensors, self._source = tensors, source
        self.unused: frozenset[int] = frozenset()
        self._buffers = [make_buffer(tensor.count, tensor.dtype) for tensor in tensors]
        buckets = [
            Bucket(tensor.dtype, (Slot(index, 0, tensor.count),), tensor.count, frozenset({index}))
            for index, tensor in enumerate(tensors)
        ]
        source.on_plan(Plan(tuple(tensors), tuple(buckets)))

    def read(self, index: int) -> Array:
        """Return the tensor's present values, (n,), in its math_dtype().

        The caller may change the memory until the next read() or write() of the tensor.
        """
        buffer = self._buffers[index]
        self.unused = (self.unused - {index}) | self._source.fill(index, buffer, (0, 0)).locally_unused
        return buffer.array if buffer.dtype not in HALF else _cast(buffer, "float32").array

    def write(self, index: int, values: Array, unused: Collection[int] = ()) -> None:
        """Set the tensor to these values, (n,), rounded to its dtype; after read(). unused: see TensorSource.drain."""
        buffer = self._buffers[index]
        if buffer.dtype in HALF:
            _arithmetic.cast(buffer, Buffer(values, "float32"))
        elif values is not buffer.array:
            np.copyto(buffer.array, values)
        self._source.drain(index, buffer, unused)

    def rounded(self, index: int, values: Array) -> Array:
        """Return what read() returns after write() of these values; the same array if nothing is rounded."""
        dtype = self._tensors[index].dtype
        if dtype not in HALF:
            return values
        return _cast(_cast(Buffer(values, "float32"), dtype), "float32").array


class FlatValues:
    """Reads and writes all tensors of a source as one concatenated array.

    count: number of elements of the array. dtype: float64 if a tensor is float64, else float32. unused: see
    ParameterValues.
    """

    def __init__(self, tensors: Sequence[TensorSpec], source: TensorSource) -> None:
        self._tensors, self._values = tensors, ParameterValues(tensors, source)
        self.count = sum(tensor.count for tensor in tensors)
        self.dtype = max((math_dtype(tensor.dtype) for tensor in tensors), default="float32")

    @property
    def unused(self) -> frozenset[int]:
        """The tensors that this rank did not use when they were read."""
        return self._values.unused

    def read(self, flat: Array) -> None:
        """Fill `flat` (count,)."""
        at = 0
        for index, tensor in enumerate(self._tensors):
            flat[at : at + tensor.count] = self._values.read(index)
            at += tensor.count

    def write(self, flat: Array, unused: Collection[int] = ()) -> None:
        """Set the tensors to the values in `flat` (count,); after read(). unused: see TensorSource.drain."""
        at = 0
        for index, tensor in enumerate(self._tensors):
            values = flat[at : at + tensor.count].astype(math_dtype(tensor.dtype), copy=False)
            self._values.write(index, values, {index}.intersection(unused))
            at += tensor.count


def zeros_for(tensor: TensorSpec) -> Array:
    """Return zeros, (n,), in the tensor's math_dtype()."""
    return np.zeros(tensor.count, STORAGE[math_dtype(tensor.dtype)])


def _cast(buffer: Buffer, dtype: str) -> Buffer:
    out = make_buffer(buffer.count, dtype)
    _arithmetic.cast(out, buffer)
    return out
