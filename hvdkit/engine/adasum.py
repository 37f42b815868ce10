"""Adasum: gradients added where they are orthogonal, averaged where they are parallel (Maleki et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buffer import FLOATS, HALF, STORAGE, Array, Buffer, as_buffer, make_buffer

_CHUNK = 64 * 1024  # number of elements that are widened at a time, so that they stay in cache


def adasum(transport: Transport, buffers: Sequence[Buffer]) -> None:
    """Replace each buffer by the adaptive sum of all ranks' buffers, in place; collective.

    Two vectors a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b. Each buffer has factors of its own, so that
    a tensor's result does not depend on the other buffers of the call; a vector of zeros adds nothing. Ranks are paired
    in order, (0, 1), (2, 3) and so on, then the pairs' results in the same way; an unpaired vector goes unchanged to
    the next level, so any number of ranks is possible. As in Horovod without NCCL, the ranks of a host are not averaged
    first. Dot products are computed in float64; float16 and bfloat16 are kept in float32 and rounded once.

    buffers: (n,) each, float16 bfloat16 float32 or float64; counts and dtypes are the same on all ranks.
    Each rank sends every element about twice and holds one more copy of the buffers, two of float16 and bfloat16.
    Raises TypeError for other dtypes, before anything is sent. Source: arXiv:2006.02924.
    """
    for buffer in buffers:
        if buffer.dtype not in FLOATS:
            raise TypeError(
                f"Adasum needs floating-point tensors, not {buffer.dtype}. Use op=hvd.Sum or op=hvd.Average."
            )
    if transport.size == 1 or not buffers:
        return
    dtypes = sorted({buffer.dtype for buffer in buffers})
    shards = [_Shard(transport, [buffer for buffer in buffers if buffer.dtype == dtype]) for dtype in dtypes]
    while len(shards[0].vectors) > 1:
        # All dot products of a level in one message: (tensors, pairs, 3).
        products = np.concatenate([shard.products() for shard in shards])
        transport.allreduce(as_buffer(products))
        start = 0
        for shard in shards:
            stop = start + len(shard.pieces)
            shard.merge(products[start:stop])
            start = stop
    for shard in shards:
        shard.gather()


class _Shard:
    """This rank's shard of all ranks' buffers of one dtype, concatenated.

    vectors: at first one a rank, in rank order; half as many after each level. pieces: the range of each tensor in a
    vector.
    """

    def __init__(self, transport: Transport, buffers: Sequence[Buffer]) -> None:
        self._transport, self._buffers = transport, buffers
        self._dtype = buffers[0].dtype
        total = sum(buffer.count for buffer in buffers)
        self._counts = [total * (i + 1) // transport.size - total * i // transport.size for i in range(transport.size)]
        first = sum(self._counts[: transport.rank])
        length = self._counts[transport.rank]
        ends = np.cumsum([0, *(buffer.count for buffer in buffers)]).clip(first, first + length) - first
        self.pieces = [slice(start, stop) for start, stop in pairwise(ends.tolist())]
        joined = buffers[0]
        if len(buffers) > 1:
            joined = Buffer(np.concatenate([buffer.array for buffer in buffers]), self._dtype)
        received = transport.alltoall(joined, self._counts, [length] * transport.size)
        self.vectors: list[Array] = list(_widen(transport.arithmetic, received).reshape(transport.size, length))

    def products(self) -> NDArray[np.float64]:
        """Compute this shard's a.b, a.a and b.b for each tensor and each pair: (tensors, pairs, 3)."""
        pairs = list(zip(self.vectors[::2], self.vectors[1::2], strict=False))
        products = np.zeros((len(self.pieces), len(pairs), 3))
        with np.errstate(all="ignore"):
            for row, piece in zip(products, self.pieces, strict=True):
                for at, (a, b) in enumerate(pairs):
                    row[at] = _dots(a[piece], b[piece])
        return products

    def merge(self, products: NDArray[np.float64]) -> None:
        """Replace each pair by its adaptive sum. products: the results of products(), summed over all ranks."""
        with np.errstate(all="ignore"):
            for row, piece in zip(products, self.pieces, strict=True):
                for at, (dot, a_squared, b_squared) in enumerate(row.tolist()):
                    a, b = self.vectors[2 * at][piece], self.vectors[2 * at + 1][piece]
                    _add(a, b, _factor(dot, a_squared), _factor(dot, b_squared))
        self.vectors = self.vectors[::2]

    def gather(self) -> None:
        """Copy the last vector into the buffers of every rank."""
        mine = make_buffer(self.vectors[0].size, self._dtype)
        wide = as_buffer(np.ascontiguousarray(self.vectors[0]))
        self._transport.arithmetic.cast(mine, wide)
        gathered = self._transport.allgather(mine, self._counts)
        start = 0
        for buffer in self._buffers:
            self._transport.arithmetic.copy(buffer, gathered.slice(start, start + buffer.count))
            start += buffer.count


def _widen(arithmetic: Arithmetic, buffer: Buffer) -> Array:
    """Return the buffer's numbers in the dtype of the computation; the same memory if it is the buffer's dtype."""
    if buffer.dtype not in HALF:
        return buffer.array
    wide = make_buffer(buffer.count, "float32")
    arithmetic.cast(wide, buffer)
    return wide.array


def _dots(a: NDArray[Any], b: NDArray[Any]) -> tuple[float, float, float]:
    """Compute a.b, a.a and b.b in float64."""
    dot = a_squared = b_squared = 0.0
    for start in range(0, a.size, _CHUNK):
        wide_a = a[start : start + _CHUNK].astype(STORAGE["float64"])
        wide_b = b[start : start + _CHUNK].astype(STORAGE["float64"])
        dot += float(wide_a @ wide_b)
        a_squared += float(wide_a @ wide_a)
        b_squared += float(wide_b @ wide_b)
    return dot, a_squared, b_squared


def _add(a: NDArray[Any], b: NDArray[Any], a_factor: float, b_factor: float) -> None:
    """Compute a = a_factor * a + b_factor * b in float64, because a tiny vector's factor may exceed float32."""
    for start in range(0, a.size, _CHUNK):
        piece = slice(start, start + _CHUNK)
        a[piece] = a[piece].astype(STORAGE["float64"]) * a_factor + b[piece].astype(STORAGE["float64"]) * b_factor


def _factor(dot: float, squared: float) -> float:
    """Return a vector's factor: 1/2 if both vectors are equal; 1 if they are orthogonal, or this vector is zero."""
    return 1.0 - dot / (2.0 * squared) if squared else 1.0
