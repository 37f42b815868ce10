"""Codings that send a magnitude for each block of numbers, and one bit or one byte for each number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdkit.transport.buffer import Array
from hvdkit.transport.coding.api import Matrix
from hvdkit.transport.coding.coders import Bytes, GatheredCoder, GatheredCoding

_SIGNS, _INTEGERS = 1024, 256  # numbers in a block, which share a magnitude
_LARGEST = 127


class _BlockCoder(GatheredCoder):
    """Writes messages of the magnitude of each block of `size` numbers as float32, then `rest` bytes."""

    def __init__(self, count: int, exact: int, dtype: str, size: int, rest: int) -> None:
        self._starts = np.arange(0, count, size)
        self._lengths = np.diff(np.append(self._starts, count))
        super().__init__(count, exact, dtype, 4 * len(self._starts) + rest)

    def _divide(self, message: Bytes, sign: int) -> tuple[NDArray[np.float32], Bytes]:
        """Return the magnitude for each number, times `sign`, and the rest of a message."""
        at = 4 * len(self._starts)
        return np.repeat(sign * message[:at].copy().view(np.float32), self._lengths), message[at:]


@dataclass(frozen=True)
class Sign(GatheredCoding):
    """Send the sign of each value, and the mean magnitude of each 1024 values: a 31st of the bytes of float32.

    The error is added to the next step (Karimireddy et al., 2019; Seide et al., "1-Bit Stochastic Gradient Descent",
    2014). Methods: see Coding.
    """

    def open(self, count: int, exact: int, dtype: str, matrices: Sequence[Matrix] = ()) -> SignCoder:
        return SignCoder(count, exact, dtype)


class SignCoder(_BlockCoder):
    """Writes messages of the mean magnitude of each block, then the signs as bits."""

    def __init__(self, count: int, exact: int, dtype: str) -> None:
        super().__init__(count, exact, dtype, _SIGNS, -(-count // 8))

    def encode(self, values: Array) -> Bytes:
        means = (np.add.reduceat(np.abs(values), self._starts) / self._lengths).astype(np.float32)
        return np.concatenate([means.view(np.uint8), np.packbits(values >= 0)])

    def add(self, total: Array, message: Bytes, sign: int) -> None:
        means, signs = self._divide(message, sign)
        positive = np.unpackbits(signs, count=self.count).view(np.bool_)
        total += np.where(positive, means, -means)


@dataclass(frozen=True)
class Int8(GatheredCoding):
    """Send each value as an integer from -127 to 127, with a scale for each 256 values: a quarter of float32's bytes.

    The error of a value is at most 1/254 of the largest magnitude in its block; it is added to the next step. Every
    host receives the other hosts' bytes and adds them up in float32, so with n hosts it receives n-1 bytes a number:
    from 9 hosts on, an allreduce of float32 takes fewer bytes. Methods: see Coding.
    """

    def open(self, count: int, exact: int, dtype: str, matrices: Sequence[Matrix] = ()) -> Int8Coder:
        return Int8Coder(count, exact, dtype)


class Int8Coder(_BlockCoder):
    """Writes messages of the scale of each block, then the integers."""

    def __init__(self, count: int, exact: int, dtype: str) -> None:
        super().__init__(count, exact, dtype, _INTEGERS, count)

    def encode(self, values: Array) -> Bytes:
        scales = (np.maximum.reduceat(np.abs(values), self._starts) / _LARGEST).astype(np.float32)
        steps = np.repeat(scales, self._lengths)
        steps[steps == 0] = 1
        # If the scale was rounded down, the largest number of the block may be a little more than 127.
        numbers = np.clip(np.rint(values / steps), -_LARGEST, _LARGEST)
        return np.concatenate([scales.view(np.uint8), numbers.astype(np.int8).view(np.uint8)])

    def add(self, total: Array, message: Bytes, sign: int) -> None:
        scales, numbers = self._divide(message, sign)
        total += scales * numbers.view(np.int8)
