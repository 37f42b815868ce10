"""Send one bit of each number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdkit.transport.buffer import Array
from hvdkit.transport.coding.api import Matrix
from hvdkit.transport.coding.gathered import Bytes, GatheredCoder

_BLOCK = 1024  # numbers that share a magnitude


@dataclass(frozen=True)
class Sign:
    """Send the sign of each value, and the mean magnitude of each 1024 values: a 31st of the bytes of float32.

    The error is added to the next step (Karimireddy et al., 2019; Seide et al., "1-Bit Stochastic Gradient Descent",
    2014). Methods: see Coding.
    """

    of_matrices: ClassVar[bool] = False

    def codes(self, shape: Sequence[int]) -> bool:
        return True

    def open(self, count: int, exact: int, dtype: str, matrices: Sequence[Matrix] = ()) -> SignCoder:
        return SignCoder(count, exact, dtype)


class SignCoder(GatheredCoder):
    """The mean magnitude of each block as float32, then the signs as bits."""

    def __init__(self, count: int, exact: int, dtype: str) -> None:
        self._starts = np.arange(0, count, _BLOCK)
        self._lengths = np.diff(np.append(self._starts, count))
        super().__init__(count, exact, dtype, 4 * len(self._starts) + -(-count // 8))

    def encode(self, values: Array) -> Bytes:
        means = (np.add.reduceat(np.abs(values), self._starts) / self._lengths).astype(np.float32)
        return np.concatenate([means.view(np.uint8), np.packbits(values >= 0)])

    def add(self, total: Array, message: Bytes, sign: int) -> None:
        at = 4 * len(self._starts)
        means = np.repeat(sign * message[:at].copy().view(np.float32), self._lengths)
        positive = np.unpackbits(message[at:], count=self.count).view(np.bool_)
        total += np.where(positive, means, -means)
