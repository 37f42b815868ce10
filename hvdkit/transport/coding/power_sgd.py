"""The coding PowerSGD, which sends the product of two thin matrices in place of a large matrix."""

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

_EMPTY = 1e-6  # of the longest column's length: a shorter column is only a rounding error


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a tensor seen as a matrix; one row for a vector.

    More than 2 dimensions become (shape[0], the rest), because PyTorch's convolution kernels have their outputs first;
    or (the rest, shape[-1]) if rows and columns are then fewer, because those of TensorFlow and JAX have them last.
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
    are computed by one step of the power method, which starts from the previous step's matrices. The error of their
    product is added to the next gradient. Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for
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
    """See Coder. Both factors of a matrix are summed over the ranks, so the bytes do not grow with the number of ranks.

    The factors of all matrices are sent together: first the left factors, of shape (rows, rank), then the right
    factors, of shape (columns, rank). A rank whose numbers are not finite makes its left factors NaN. The sum is then
    finite on no rank, and all ranks sum their numbers uncoded.

    The first round takes two steps of the power method, and sends twice as much. If a gradient's rank does not exceed
    the requested rank, one step from random matrices leaves a relative error of up to 1e-4 (float32), two steps 1e-6.
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
        """Fill empty columns of the right factors with random directions, the same on all ranks.

        All columns are empty at first, and some are after a gradient whose rank was lower than the requested rank.
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
    """Orthonormalize columns, (n, r), by modified Gram-Schmidt; a column that depends on earlier columns becomes 0.

    It computes in float64 and without LAPACK, whose results differ in the last bits between kinds of processors.
    """
    basis = np.array(columns.T, np.float64, order="C")  # each column is a row here, and so is contiguous
    for at, column in enumerate(basis):
        before = np.sqrt(np.sum(column * column))
        for earlier in basis[:at]:
            column -= np.sum(earlier * column) * earlier
        length = np.sqrt(np.sum(column * column))
        column[:] = column / length if length > 1e-6 * before else 0.0
    return np.ascontiguousarray(basis.T.astype(columns.dtype))
