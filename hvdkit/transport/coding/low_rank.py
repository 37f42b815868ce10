"""A basis that comes out alike on every rank."""

from __future__ import annotations

import numpy as np

from hvdkit.transport.base import Array


def orthonormal(columns: Array) -> Array:
    """Columns, (n, r), made orthonormal one after the other (modified Gram-Schmidt); a column of nothing new stays 0.

    In float64 and without LAPACK, whose results differ in their last bits between kinds of processors.
    """
    basis = columns.astype(np.float64)
    for at in range(basis.shape[1]):
        column = basis[:, at]
        before = np.sqrt(np.sum(column * column))
        for earlier in range(at):
            column -= np.sum(basis[:, earlier] * column) * basis[:, earlier]
        length = np.sqrt(np.sum(column * column))
        column[:] = column / length if length > 1e-6 * before else 0.0
    return basis.astype(columns.dtype)
