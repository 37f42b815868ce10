"""Adds, scales and casts buffers; with numpy, in chunks that stay in the cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdkit.transport.buffer import COMPLEX, FLOAT8, HALF, SCALED, STORAGE, Array, Buffer, Op

_CHUNK_BYTES = 256 * 1024

_COMBINE: dict[Op, np.ufunc] = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
_COMBINE_BOOL: dict[Op, np.ufunc] = {
    "sum": np.logical_or,
    "min": np.logical_and,
    "max": np.logical_or,
    "product": np.logical_and,
}
_LARGEST: dict[str, float] = {
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
    "float32": float(np.finfo(np.float32).max),
    "float64": float(np.finfo(np.float64).max),
}


def check_reduction(dtype: str, op: str, call: str) -> None:
    """Raise TypeError if the reduction is not defined for the dtype.

    op: an Op, or "average". call: the name of the call, for the message.
    """
    if dtype in FLOAT8:
        raise TypeError(
            f"{call}: op {op} of {dtype} is not supported. With at most 4 bits of mantissa, sums overflow or are "
            "lost in rounding, and values of different ranks may have different scales. Cast to bfloat16 or float32, "
            f"reduce, and cast back. broadcast, allgather and alltoall support {dtype}."
        )
    if dtype in COMPLEX and op in ("min", "max"):
        raise TypeError(
            f"{call}: op {op} of {dtype} is not supported, because complex numbers have no order. Reduce their "
            "magnitudes, or their real and imaginary parts separately."
        )


def check_scale(dtype: str, scale: float) -> None:
    """Raise ValueError for a factor other than 1 if numbers of this dtype cannot be scaled."""
    if scale != 1.0 and dtype not in SCALED:
        raise ValueError(f"cannot scale {dtype} by {scale}; only floating-point and complex tensors can be scaled")


class Arithmetic(Protocol):
    """The operations that transports do on numbers."""

    def combine(self, out: Buffer, sources: Sequence[Buffer], op: Op = "sum", scale: float = 1.0) -> None:
        """Set out = scale * op(sources), element-wise; float16 and bfloat16 in float32, rounded once.

        out: may be one of `sources`; may have a wider dtype than 16-bit sources.
        sources: buffers of the same dtype and number of elements.
        op: the reduction.
        scale: 1.0 for integers and bools.
        """

    def cast(self, out: Buffer, source: Buffer, scale: float = 1.0) -> None:
        """Set out = scale * source in out's dtype; too large finite values become its largest, inf and nan stay."""

    def copy(self, out: Buffer, source: Buffer) -> None:
        """Set out = source; both have the same dtype."""


class NumpyArithmetic:
    """Arithmetic with numpy alone. It has no state, so any thread may use it.

    A sum is taken in the order of `sources`, whichever of them is `out`. Integers wrap; a sum or product of bools is
    their or / and; a sum too large for its dtype is inf.
    """

    def combine(self, out: Buffer, sources: Sequence[Buffer], op: Op = "sum", scale: float = 1.0) -> None:
        """See Arithmetic.combine.

        Raises ValueError for buffers that do not match, or a scale on integers; TypeError as check_reduction().
        """
        dtype = sources[0].dtype
        fits = dtype == out.dtype or (dtype in HALF and out.dtype in ("float32", "float64"))
        for source in sources:
            if source.dtype != dtype or source.array.size != out.array.size or not fits:
                raise ValueError(
                    f"cannot combine {source.count} {source.dtype} into {out.count} {out.dtype}; counts and dtypes "
                    "must be equal"
                )
        check_reduction(dtype, op, "combine")
        check_scale(out.dtype, scale)
        function = _COMBINE_BOOL[op] if out.dtype == "bool" else _COMBINE[op]
        arrays = [source.array for source in sources]
        with np.errstate(all="ignore"):
            if dtype in HALF:
                _combine_half(out, arrays, dtype, function, scale)
            else:
                _combine_plain(out.array, arrays, function, scale)

    def cast(self, out: Buffer, source: Buffer, scale: float = 1.0) -> None:
        """See Arithmetic.cast. Raises TypeError if `out` is not floating point, ValueError if the counts differ."""
        if out.dtype not in _LARGEST:
            raise TypeError(f"cannot cast {source.dtype} to {out.dtype}; the target must be floating point")
        if source.count != out.count:
            raise ValueError(f"cannot cast {source.count} {source.dtype} into {out.count} {out.dtype}")
        if source.dtype == out.dtype and scale == 1.0:
            self.copy(out, source)
            return
        may_exceed = scale != 1.0 or _LARGEST.get(source.dtype, np.inf) > _LARGEST[out.dtype]
        wide = np.dtype("f4") if {out.dtype, source.dtype} <= HALF | {"float32"} else np.dtype("f8")
        scratch = np.empty(min(out.count, _CHUNK_BYTES // wide.itemsize), wide)
        with np.errstate(all="ignore"):
            for piece in _pieces(out.count, _CHUNK_BYTES // wide.itemsize):
                given = source.array[piece]
                values = _widen(given, source.dtype, scratch[: given.size])
                if scale != 1.0:
                    values = np.multiply(values, wide.type(scale), out=scratch[: given.size])
                if may_exceed:
                    values = _clamp(values, given, source.dtype, _LARGEST[out.dtype])
                _narrow(values, out.array[piece], out.dtype)

    def copy(self, out: Buffer, source: Buffer) -> None:
        np.copyto(out.array, source.array, casting="no")


def _pieces(count: int, step: int) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _combine_plain(out: Array, sources: Sequence[Array], function: np.ufunc, scale: float) -> None:
    step = _CHUNK_BYTES // out.itemsize
    if out.size <= step and len(sources) == 2:  # small buffers, for which ranks wait
        function(sources[0], sources[1], out=out)
        if scale != 1.0:
            _scale(out, scale, out)
        return
    # The first two sources are read before `out` is written; a later source must not be overwritten.
    scratch = None
    if any(np.may_share_memory(out, later) for later in sources[2:]):
        scratch = np.empty(min(out.size, step), out.dtype)
    for piece in _pieces(out.size, step):
        target = out[piece]
        total = target if scratch is None else scratch[: target.size]
        if len(sources) == 1:
            total = sources[0][piece]
        else:
            function(sources[0][piece], sources[1][piece], out=total)
        for source in sources[2:]:
            function(total, source[piece], out=total)
        if scale != 1.0:
            _scale(total, scale, target)
        elif total is not target:
            np.copyto(target, total)


def _combine_half(out: Buffer, sources: Sequence[Array], dtype: str, function: np.ufunc, scale: float) -> None:
    step = _CHUNK_BYTES // 4
    scratch = np.empty((2, min(out.count, step)), np.float32)
    for piece in _pieces(out.count, step):
        target = out.array[piece]
        total, other = scratch[0, : target.size], scratch[1, : target.size]
        _widen(sources[0][piece], dtype, total)
        for source in sources[1:]:
            function(total, _widen(source[piece], dtype, other), out=total)
        if scale != 1.0:
            _scale(total, scale, total)
        _narrow(total, target, out.dtype)


def _scale(values: Array, scale: float, out: Array) -> None:
    """Multiply by `scale`; divide instead if it is the reciprocal of a whole number, because 1/3 is itself rounded."""
    if values.dtype.kind == "c":  # real and imaginary parts separately: a complex product would turn inf into nan
        part = values.real.dtype
        values, out = values.view(part), out.view(part)
    divisor = round(1 / scale) if scale else 0
    if divisor > 1 and divisor & (divisor - 1) and 1 / divisor == scale:
        np.divide(values, out.dtype.type(divisor), out=out)
    else:
        np.multiply(values, out.dtype.type(scale), out=out)


def _widen(array: Array, dtype: str, scratch: Array) -> Array:
    """Return the numbers of `array` in scratch's dtype: `array` itself if it has this dtype, else `scratch`, filled."""
    if dtype == "bfloat16":
        # A bfloat16 is the upper half of a float32.
        target = scratch if scratch.dtype == np.float32 else np.empty(scratch.size, np.float32)
        bits = target.view(np.uint32)
        np.copyto(bits, array)
        np.left_shift(bits, np.uint32(16), out=bits)
        if target is not scratch:
            np.copyto(scratch, target)
        return scratch
    if array.dtype == scratch.dtype:
        return array
    if dtype == "float16" and scratch.dtype == np.float32:
        return np.take(_wide_halves(), array.view(np.uint16), out=scratch, mode="clip")
    np.copyto(scratch, array)
    return scratch


@functools.cache
def _wide_halves() -> NDArray[np.float32]:
    """Return a table of the float32 of each float16, (65536,), by its bits: it takes half the time of numpy's cast.

    Multiplying the shifted bits is faster still, but wrong if a framework's thread treats denormals as zero.
    """
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _narrow(values: Array, out: Array, dtype: str) -> None:
    """Write `values` to `out`, rounded to nearest, ties to even."""
    if dtype == "bfloat16":
        out[:] = _round_bfloat16(values.astype(np.float32, copy=False))
    else:
        np.copyto(out, values, casting="unsafe")


def _round_bfloat16(values: NDArray[np.float32]) -> NDArray[Any]:
    """Return the 16 bits of each value as bfloat16."""
    bits = values.view(np.uint32)
    rounded = np.right_shift(bits, np.uint32(16))
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    if np.isnan(values.max(initial=-np.inf)):
        nan = np.isnan(values)
        # Rounding could turn a nan into inf or zero by a carry: keep its sign and make it a quiet nan.
        rounded[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
    return rounded.astype(STORAGE["bfloat16"])


def _clamp(values: Array, source: Array, dtype: str, largest: float) -> Array:
    """Clamp the values to +-largest, except where `source` is inf or nan."""
    if values.size == 0 or (values.min() >= -largest and values.max() <= largest):
        return values  # comparisons with nan are False, so a nan does not return here
    finite = np.isfinite(_widen(source, dtype, np.empty(source.size, values.dtype)))
    return np.where(finite, np.clip(values, -largest, largest), values)
