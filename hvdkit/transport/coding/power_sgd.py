"""Send a product of two thin matrices in place of a large one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdkit.transport.between.collectives import sum_steps
from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buffer import STORAGE, Array, Buffer
from hvdkit.transport.coding.api import Matrix
from hvdkit.transport.coding.coders import all_finite, uncoded_steps

_EMPTY = 1e-6  # of the longest column's length: what rounding leaves of one that has nothing to say


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor seen as a matrix; one row for a vector.

    More than 2 dimensions are (shape[0], the rest), as a convolution's kernel of PyTorch has its outputs first; or
    (the rest, shape[-1]) where rows and columns are fewer, as TensorFlow's and JAX's have them last.
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    first = shape[0], math.prod(shape[1:])
    last = math.prod(shape[:-1]), shape[-1]
    return min(first, last, key=sum)


@dataclass(frozen=True)
class PowerSGD:
    """Send each gradient of a weight matrix as the product of two matrices with `rank` columns.

    A matrix of m rows and n columns is sent as rank * (m + n) numbers. Vectors, and tensors that would not become
    smaller, are sent unchanged. A tensor of more dimensions is treated as a matrix (see matrix_shape). The two matrices
    are computed by one step of the power method, which starts from those of the step before. The error of their product
    is added to the next gradient. Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", 2019, algorithms 1 and 2. Methods: see Coding.
    """

    of_matrices: ClassVar[bool] = True
    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"PowerSGD({self.rank!r}): rank is a number of columns; it must be 1 or more.")

    def codes(self, shape: Sequence[int]) -> bool:
        rows, columns = matrix_shape(shape)
        return self.rank * (rows + columns) < rows * columns

    def open(self, count: int, exact: int, dtype: str, matrices: Sequence[Matrix] = ()) -> PowerCoder:
        return PowerCoder(count, exact, dtype, matrices, self.rank)


class PowerCoder:
    """See Coder. Both factors of a matrix are summed over the ranks: what a rank sends does not grow with their number.

    The factors of all matrices travel together: first the left ones, of shape (rows, rank), then the right ones, of
    shape (columns, rank). A rank whose numbers are not finite makes its left factors NaN. Their sum is then finite on
    no rank, and all of them sum their numbers uncoded.

    The first round takes two steps of the power method, and sends twice as much. One step from random matrices leaves a
    relative error of up to 1e-4 where a gradient's rank is no higher than asked for (float32), two steps 1e-6.
    """

    def __init__(self, count: int, exact: int, dtype: str, matrices: Sequence[Matrix], rank: int) -> None:
        self.count, self._dtype, self._rank = count, dtype, rank
        self._matrices = list(matrices)
        self._left_ends = list(itertools.accumulate((one.rows * rank for one in matrices), initial=0))
        self._right_ends = list(itertools.accumulate((one.columns * rank for one in matrices), initial=0))
        edges = [0, *itertools.chain(*((one.start, one.start + one.rows * one.columns) for one in matrices)), count]
        self._gaps = [slice(*pair) for pair in zip(edges[::2], edges[1::2], strict=True) if pair[0] < pair[1]]
        self.sent_bytes = (self._left_ends[-1] + self._right_ends[-1] + exact) * STORAGE[dtype].itemsize
        self._unsent = np.zeros(count, STORAGE[dtype])
        self._right: Array = np.zeros(self._right_ends[-1], STORAGE[dtype])
        self._warm = False
        self._fill_empty_columns()

    def _fill_empty_columns(self) -> None:
        """Give the right factors a direction to look in where they have none: any will do, if all ranks have the same.

        They have none in the beginning, and after a gradient whose rank was lower than that asked for.
        """
        for at, right in enumerate(self._factors(self._right, self._right_ends)):
            lengths = np.abs(right).max(axis=0)
            empty = lengths <= _EMPTY * lengths.max()
            if empty.any():
                right[:, empty] = np.random.default_rng(at).standard_normal(right.shape)[:, empty]

    def _factors(self, numbers: Array, ends: Sequence[int]) -> list[Array]:
        return [numbers[start:end].reshape(-1, self._rank) for start, end in itertools.pairwise(ends)]

    def _views(self, numbers: Array) -> list[Array]:
        return [
            numbers[start : start + rows * columns].reshape(rows, columns) for start, rows, columns in self._matrices
        ]

    def steps(self, wire: Wire, source: Buffer, out: Buffer) -> Iterator[bool]:
        cut = self._left_ends[-1]
        left: Array = np.empty(cut + source.count - self.count, source.array.dtype)
        right = np.empty_like(self._right)
        lefts, rights = self._factors(left, self._left_ends), self._factors(right, self._right_ends)
        with np.errstate(all="ignore"):
            values = source.array[: self.count] + self._unsent
        for gap in self._gaps:
            values[gap] = 0
        matrices, before = self._views(values), self._factors(self._right, self._right_ends)
        for last in (True,) if self._warm else (False, True):
            with np.errstate(all="ignore"):
                for matrix, basis, start in zip(matrices, lefts, before, strict=True):
                    np.matmul(matrix, start, out=basis)
            if not all_finite(values):
                left[:cut] = np.nan
            left[cut:] = source.array[self.count :]
            yield from sum_steps(wire, Buffer(left, self._dtype), free=False)
            if not all_finite(left[:cut]):
                yield from uncoded_steps(wire, source, out)
                return
            with np.errstate(all="ignore"):
                for matrix, basis, product in zip(matrices, lefts, rights, strict=True):
                    basis[:] = orthonormal(basis)
                    np.matmul(matrix.T, basis, out=product)
                    if last:
                        matrix -= basis @ product.T
            yield from sum_steps(wire, Buffer(right, self._dtype), free=last)
            before = rights
        with np.errstate(all="ignore"):
            for target, basis, product in zip(self._views(out.array), lefts, rights, strict=True):
                np.matmul(basis, product.T, out=target)
        for gap in self._gaps:
            out.array[gap] = 0
        out.array[self.count :] = left[cut:]
        if all_finite(right) and all_finite(values):
            self._unsent, self._right, self._warm = values, right, True
            self._fill_empty_columns()


def orthonormal(columns: Array) -> Array:
    """Columns, (n, r), made orthonormal one after the other (modified Gram-Schmidt); a column of nothing new stays 0.

    In float64 and without LAPACK, whose results differ in their last bits between kinds of processors.
    """
    basis = np.array(columns.T, np.float64, order="C")  # a column is a row here, and so lies together
    for at, column in enumerate(basis):
        before = np.sqrt(np.sum(column * column))
        for earlier in basis[:at]:
            column -= np.sum(earlier * column) * earlier
        length = np.sqrt(np.sum(column * column))
        column[:] = column / length if length > 1e-6 * before else 0.0
    return np.ascontiguousarray(basis.T.astype(columns.dtype))
