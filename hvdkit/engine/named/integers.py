"""Scaling and averages of integers: summed in a dtype that cannot overflow, divided once, the fraction dropped.

Fractions are dropped towards zero, as Horovod does. Horovod sums in the tensor's own dtype, where 200 + 200 + 200 is 88
in uint8, and its average 29.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.transport.buffer import STORAGE, Array, Buffer, make_buffer


def multiply(buffer: Buffer, factor: float) -> None:
    """Multiply integers in place; fractions of the products are dropped, as in Horovod."""
    if factor == 1.0:
        return
    divisor = _divisor(factor)
    if divisor and buffer.dtype != "bool":
        buffer.array[:] = _divide(buffer.array, divisor, 0)  # exact, unlike a product of floats
    else:
        buffer.array[:] = (buffer.array * factor).astype(buffer.array.dtype)


def widen(buffer: Buffer, size: int, prescale: float = 1.0) -> Buffer:
    """Make the prescaled numbers that are summed over `size` ranks for the average of `buffer` (n,), in new memory.

    The result is (n,) of int32 or int64. For 64-bit integers it is (2n,) of their own dtype: quotient and remainder of
    each number by `size`, in turn, because the sums of quotients and of remainders fit where the sum of the numbers
    would overflow.
    """
    storage = STORAGE[buffer.dtype]
    if storage.itemsize < 8:
        small = storage.itemsize < 4 and abs(prescale) <= 1
        wide = make_buffer(buffer.count, "int32" if small else "int64")
        wide.array[:] = buffer.array
        multiply(wide, prescale)
        return wide
    numbers = Buffer(buffer.array.copy(), buffer.dtype)
    multiply(numbers, prescale)
    pairs = make_buffer(2 * buffer.count, buffer.dtype)
    np.floor_divide(numbers.array, size, out=pairs.array[::2])
    np.remainder(numbers.array, size, out=pairs.array[1::2])
    return pairs


def finish_average(out: Buffer, total: Buffer, size: int, postscale: float = 1.0) -> None:
    """Compute out (n,) = postscale * the average over `size` ranks.

    out: overwritten with the result.
    total: the sum of all ranks' widen() results; it is changed.
    size: number of ranks.
    postscale: factor on the average.
    """
    whole: Array = total.array
    rest: Any = 0
    factor = postscale / size
    if total.count == 2 * out.count:
        left = total.array[1::2]
        whole = total.array[::2] + left // size  # overflow here undoes an overflow in the quotients' sum
        rest = left % size
        factor = postscale
    divisor = _divisor(factor)
    if divisor:
        out.array[:] = _divide(whole, divisor, rest)
    else:
        out.array[:] = ((whole + rest / size) * factor).astype(out.array.dtype)


def _divisor(factor: float) -> int:
    """Return the integer n >= 1 with factor == 1 / n; 0 if none exists, or none within 63 bits."""
    divisor = round(1 / factor) if factor >= 2.0**-62 else 0
    return divisor if divisor and 1 / divisor == factor else 0


def _divide(numbers: Array, divisor: int, rest: Any) -> Array:
    """Divide integers (n,), rounding towards zero. rest: (n,) or scalar; the numbers' fractions in [0, 1), any unit."""
    if divisor > np.iinfo(numbers.dtype).max:
        numbers = numbers.astype(np.int64)
    quotients: Array = numbers // divisor
    quotients += (numbers < 0) & ((quotients * divisor != numbers) | (rest != 0))
    return quotients
