"""Matrices of low rank: how a tensor is seen as a matrix, and a basis that comes out alike on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvdkit.transport.buffer import Array


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
