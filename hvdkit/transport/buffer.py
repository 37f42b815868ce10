"""Defines Buffer, contiguous memory seen as numbers, and the dtypes that are moved and reduced."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Op = Literal["sum", "min", "max", "product"]

#: A wire dtype between hosts; "none" for the dtype of the numbers.
Narrow = Literal["none", "float16", "bfloat16"]

Array = NDArray[Any]

#: 8-bit floating-point dtypes, by the names of torch and ml_dtypes. They are moved, not reduced.
FLOAT8 = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
)

#: dtype name -> numpy dtype of the memory. numpy has neither bfloat16 nor float8: they travel as their bits.
STORAGE: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"),
    "int8": np.dtype("i1"),
    "int16": np.dtype("i2"),
    "int32": np.dtype("i4"),
    "int64": np.dtype("i8"),
    "uint16": np.dtype("u2"),
    "uint32": np.dtype("u4"),
    "uint64": np.dtype("u8"),
    "bool": np.dtype("?"),
    "float16": np.dtype("f2"),
    "bfloat16": np.dtype("u2"),
    "float32": np.dtype("f4"),
    "float64": np.dtype("f8"),
    "complex64": np.dtype("c8"),
    "complex128": np.dtype("c16"),
    **dict.fromkeys(FLOAT8, np.dtype("u1")),
}

#: dtypes that are summed in float32 and rounded once.
HALF = frozenset({"float16", "bfloat16"})

#: Real floating-point dtypes that are reduced.
FLOATS = HALF | {"float32", "float64"}

COMPLEX = frozenset({"complex64", "complex128"})

#: dtypes that are multiplied by factors without a cast; integer results are truncated (engine/named/execution.py).
SCALED = FLOATS | COMPLEX


@dataclass(slots=True, eq=False)
class Buffer:
    """Contiguous memory seen as numbers.

    array: (n,), of dtype STORAGE[dtype]; the creator of the buffer owns the memory.
    """

    array: Array
    dtype: str

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return int(self.array.size)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes."""
        return int(self.array.nbytes)

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element."""
        return STORAGE[self.dtype].itemsize

    @property
    def pointer(self) -> int:
        """Return the address of the first element, in the memory of the host or of a device."""
        return int(self.array.__array_interface__["data"][0])

    def slice(self, start: int, stop: int) -> Buffer:
        """Return the elements from `start` up to `stop`, sharing memory."""
        return type(self)(self.array[start:stop], self.dtype)

    def pieces(self, counts: Sequence[int]) -> list[Buffer]:
        """Divide the elements into consecutive slices of these counts, sharing memory."""
        ends = itertools.accumulate(counts, initial=0)
        return [self.slice(start, end) for start, end in itertools.pairwise(ends)]


def as_buffer(array: Array) -> Buffer:
    """See a contiguous numpy array of any shape as a Buffer, sharing memory.

    Raises TypeError for a dtype that hvdkit does not move, ValueError for memory that is not contiguous.
    """
    name = array.dtype.name
    if name not in STORAGE:
        raise TypeError(f"dtype {array.dtype} is not supported; hvdkit supports {', '.join(STORAGE)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"the array is not contiguous (strides {array.strides}); pass numpy.ascontiguousarray(array)")
    return Buffer(array.reshape(-1).view(STORAGE[name]), name)


def make_buffer(count: int, dtype: str) -> Buffer:
    """Make an uninitialised Buffer of `count` elements."""
    return Buffer(np.empty(count, STORAGE[dtype]), dtype)
