"""Collectives as anyone would write them: mpi4py hands every array to every rank, and numpy computes. The oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numbers_of_ranks import buffer_of, values_of

from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Array, Buffer, Op

_REDUCE: dict[Op, Callable[..., Array]] = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod}
_SEED = 20_261
_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-22, "float64": 2.0**-51}


class Naive:
    """The collectives of a Transport on float64 copies; rank and size are those of MPI's world."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size

    def allreduce(self, values: Array, op: Op, scale: float = 1.0) -> Array:
        return np.asarray(_REDUCE[op](self._comm.allgather(values), axis=0) * scale)

    def reducescatter(self, values: Array, counts: Sequence[int], op: Op) -> Array:
        start = sum(counts[: self.rank])
        return self.allreduce(values, op)[start : start + counts[self.rank]]

    def allgather(self, values: Array) -> Array:
        return np.concatenate(self._comm.allgather(values))

    def broadcast(self, values: Array, root: int) -> Array:
        return np.asarray(self._comm.allgather(values)[root])

    def alltoall(self, values: Array, counts: Sequence[int]) -> Array:
        cut = np.split(values, np.cumsum(counts)[:-1])
        return np.concatenate([pieces[self.rank] for pieces in self._comm.allgather(cut)])


def random_numbers_as_naive(transport: Transport) -> None:
    """Any numbers of any lengths give what Naive gives, to the rounding of their dtype."""
    naive = Naive()
    rank, size = transport.rank, transport.size
    assert (rank, size) == (naive.rank, naive.size)
    alike, own = np.random.default_rng(_SEED), np.random.default_rng(_SEED + 1 + rank)
    for dtype, rounding in _ROUNDING.items():
        for op in _REDUCE:
            counts = [int(count) for count in alike.integers(0, 3000, size)]
            root = int(alike.integers(size))
            mine = buffer_of(own.uniform(0.5, 2.0, sum(counts)), dtype)
            values = values_of(mine)
            rows = [counts] * size  # rank i sends counts[j] to rank j
            whole = transport.reducescatter(mine, counts, op)
            gathered = transport.allgather(mine, [mine.count] * size)
            received = transport.alltoall(mine, counts, [row[rank] for row in rows])
            _expect(whole, naive.reducescatter(values, counts, op), size * rounding)
            _expect(gathered, naive.allgather(values), 0.0)
            _expect(received, naive.alltoall(values, counts), 0.0)
            for scale in (1.0, 1 / 3):
                reduced = buffer_of(values, dtype)
                transport.allreduce(reduced, op, scale)
                _expect(reduced, naive.allreduce(values, op, scale), size * rounding)
            transport.broadcast(mine, root)
            _expect(mine, naive.broadcast(values, root), 0.0)


def _expect(buffer: Buffer, expected: Array, tolerance: float) -> None:
    np.testing.assert_allclose(values_of(buffer), expected, rtol=tolerance, atol=0)
