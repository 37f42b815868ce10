"""Numbers for the tests: patterns that every rank can work out for every other one, exact in every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.buffer import COMPLEX, FLOAT8, STORAGE, Array, Buffer, Op, make_buffer

REDUCED = tuple(dtype for dtype in STORAGE if dtype not in FLOAT8)
DTYPES = (*REDUCED, "float8_e4m3fn", "float8_e5m2")  # the other variants have the same memory
INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
OPS: tuple[Op, ...] = ("sum", "min", "max", "product")
#: Every reduction that is defined.
REDUCTIONS: tuple[tuple[str, Op], ...] = tuple(
    (dtype, op) for dtype in REDUCED for op in OPS if dtype not in COMPLEX or op in ("sum", "product")
)
_REDUCE: dict[Op, Any] = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod}


def buffer_of(values: Any, dtype: str) -> Buffer:
    """A new buffer with these numbers; of float8, the bits."""
    wide = np.atleast_1d(np.asarray(values))
    if dtype != "bfloat16":
        return Buffer(wide.astype(STORAGE[dtype]), dtype)
    out = make_buffer(wide.size, dtype)
    NumpyArithmetic().cast(out, Buffer(wide.astype(np.float64), "float64"))
    return out


def values_of(buffer: Buffer) -> Array:
    """The numbers of a buffer as float64 or complex128; bools as 0 and 1, of float8 the bits."""
    if buffer.dtype == "bfloat16":
        return (buffer.array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return buffer.array.astype(np.complex128 if buffer.dtype in COMPLEX else np.float64)


def pattern(rank: int, count: int, dtype: str = "float32", op: Op = "sum") -> Array:
    """(count,): what this rank gives; so small that no reduction over four ranks rounds, in any dtype."""
    index = np.arange(count)
    if dtype == "bool":
        return np.asarray((index + rank) % 3 == 0)
    if dtype in COMPLEX:
        return np.asarray((1 + (index + rank) % 2) + 1j * ((index + 2 * rank) % 3))
    return np.asarray(1 + (index + rank) % 2 if op == "product" else (index * 7 + rank * 3) % 11)


def reduced(size: int, count: int, dtype: str = "float32", op: Op = "sum") -> Array:
    """(count,): the reduction of every rank's pattern; for bools sum is or, product is and."""
    rows = np.stack([pattern(rank, count, dtype, op) for rank in range(size)])
    if dtype == "bool":
        return np.asarray(rows.any(axis=0) if op in ("sum", "max") else rows.all(axis=0))
    return np.asarray(_REDUCE[op](rows, axis=0))


def lengths(size: int) -> list[int]:
    """Odd lengths: nothing, one, around the number of ranks, primes, more than a cache line."""
    return sorted({0, 1, max(size - 1, 0), size, size + 1, 13, 997})


def expect(buffer: Buffer, values: Any, about: str = "") -> None:
    """Raise AssertionError unless the buffer holds just these numbers."""
    found = values_of(buffer)
    np.testing.assert_array_equal(found, np.asarray(values, found.dtype), err_msg=about)
