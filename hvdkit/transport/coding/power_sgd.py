"""Send a product of two thin matrices in place of a large one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hvdkit.transport.base import STORAGE, Array, Buffer
from hvdkit.transport.coding import all_finite, uncoded_steps
from hvdkit.transport.coding.low_rank import orthonormal
from hvdkit.transport.steps import sum_steps
from hvdkit.transport.wire import Wire


@dataclass(frozen=True)
class PowerSGD:
    """Send a bucket, seen as a square matrix, as the product of two matrices of `rank` columns.

    n numbers become 2 * rank * sqrt(n): of a bucket of 4 MiB at rank 4, 1/128. The matrices are found by one step of
    the power method from those of the step before, and what they are wrong by is added to the next (Vogels et al.,
    "PowerSGD: Practical Low-Rank Gradient Compression", 2019; there each weight is a matrix, here each bucket's part).
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"PowerSGD({self.rank!r}): the rank is a number of columns, 1 or more.")

    def open(self, count: int, exact: int, dtype: str) -> PowerCoder:
        """See Coding.open."""
        return PowerCoder(count, exact, dtype, self.rank)


class PowerCoder:
    """See Coder. Both matrices are summed over the ranks, which is what makes this coding cheap on many hosts.

    A rank whose numbers are not finite makes its left matrix NaN. The sum of the left matrices is then finite on no
    rank, and all of them sum their numbers uncoded.
    """

    def __init__(self, count: int, exact: int, dtype: str, rank: int) -> None:
        self.count, self._dtype = count, dtype
        self._rows = math.isqrt(count - 1) + 1
        self._columns = -(-count // self._rows)
        self._rank = min(rank, self._rows, self._columns)
        self.sent_bytes = ((self._rows + self._columns) * self._rank + exact) * STORAGE[dtype].itemsize
        self._unsent = np.zeros(count, STORAGE[dtype])
        # Any start will do, as long as all ranks have the same.
        start = np.random.default_rng(count).standard_normal((self._columns, self._rank))
        self._right: Array = start.astype(STORAGE[dtype])

    def steps(self, wire: Wire, source: Buffer, out: Buffer) -> Iterator[bool]:
        """See Coder.steps."""
        cut = self._rows * self._rank
        with np.errstate(all="ignore"):
            values = source.array[: self.count] + self._unsent
            matrix = np.zeros((self._rows, self._columns), values.dtype)
            matrix.reshape(-1)[: self.count] = values
            left = np.concatenate([(matrix @ self._right).reshape(-1), source.array[self.count :]])
        if not all_finite(values):
            left[:cut] = np.nan
        yield from sum_steps(wire, Buffer(left, self._dtype), free=False)
        if not all_finite(left[:cut]):
            yield from uncoded_steps(wire, source, out)
            return
        basis = orthonormal(left[:cut].reshape(self._rows, self._rank))
        right = matrix.T @ basis
        self._unsent = values - (basis @ right.T).reshape(-1)[: self.count]
        yield from sum_steps(wire, Buffer(right.reshape(-1), self._dtype), free=True)
        self._right = right
        out.array[: self.count] = (basis @ right.T).reshape(-1)[: self.count]
        out.array[self.count :] = left[cut:]
