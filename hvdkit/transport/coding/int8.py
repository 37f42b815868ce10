"""Send each number as one byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdkit.transport.buffer import Array
from hvdkit.transport.coding.api import Matrix
from hvdkit.transport.coding.gathered import Bytes, GatheredCoder

_BLOCK = 256  # numbers that share a scale
_LARGEST = 127


@dataclass(frozen=True)
class Int8:
    """Send each value as an integer from -127 to 127, with a scale for each 256 values: a quarter of float32's bytes.

    A value is wrong by at most 1/254 of the largest magnitude in its block; that is added to what is sent next. Every
    host gets the others' bytes and adds them up in float32, so with n hosts it receives n-1 bytes a number: from 9
    hosts on that is more than an allreduce of float32 takes. Methods: see Coding.
    """

    of_matrices: ClassVar[bool] = False

    def codes(self, shape: Sequence[int]) -> bool:
        return True

    def open(self, count: int, exact: int, dtype: str, matrices: Sequence[Matrix] = ()) -> Int8Coder:
        return Int8Coder(count, exact, dtype)


class Int8Coder(GatheredCoder):
    """The scale of each block as float32, then the integers."""

    def __init__(self, count: int, exact: int, dtype: str) -> None:
        self._starts = np.arange(0, count, _BLOCK)
        self._lengths = np.diff(np.append(self._starts, count))
        super().__init__(count, exact, dtype, 4 * len(self._starts) + count)

    def encode(self, values: Array) -> Bytes:
        scales = (np.maximum.reduceat(np.abs(values), self._starts) / _LARGEST).astype(np.float32)
        steps = np.repeat(scales, self._lengths)
        steps[steps == 0] = 1
        # A scale that is rounded down may make its largest number a little more than 127.
        numbers = np.clip(np.rint(values / steps), -_LARGEST, _LARGEST)
        return np.concatenate([scales.view(np.uint8), numbers.astype(np.int8).view(np.uint8)])

    def add(self, total: Array, message: Bytes, sign: int) -> None:
        at = 4 * len(self._starts)
        scales = np.repeat(sign * message[:at].copy().view(np.float32), self._lengths)
        total += scales * message[at:].view(np.int8)
