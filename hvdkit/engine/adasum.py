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

_CHUNK = 64 * 1024  # elements that are widened at a time, so that they stay in cache


def adasum(transport: Transport, buffers: Sequence[Buffer]) -> None:
    """Replace each buffer by the adaptive sum of all ranks' buffers, in place; collective.

    Two vectors a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, each buffer with factors of its own, so
    that a tensor's result does not depend on those it travels with; a vector of zeros adds nothing. Ranks are paired in
    order, (0, 1), (2, 3) and so on, then the pairs' results in the same way; one that is left over at a level goes on
    to the next as it is, so any number of ranks will do. As in Horovod without NCCL, the ranks of a host are not
    averaged first. Dot products are taken in float64, float16 and bfloat16 are held in float32 and rounded once.

    buffers: (n,) each, float16 bfloat16 float32 or float64; counts and dtypes are the same on all ranks.
    Each rank sends every element about twice and holds one more copy of the buffers, two for narrow ones.
    Raises TypeError for other dtypes, before anything is sent. Source: arXiv:2006.02924.
    """
    for buffer in buffers:
        if buffer.dtype not in FLOATS:
            raise TypeError(f"Adasum is for floating-point numbers, not {buffer.dtype}; use Sum or Average.")
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
    """This rank's part of all ranks' buffers of one dtype, laid end to end.

    vectors: at first one a rank, in rank order; half as many after each level. pieces: where each tensor lies in them.
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
        came = transport.alltoall(joined, self._counts, [length] * transport.size)
        self.vectors: list[Array] = list(_widen(transport.arithmetic, came).reshape(transport.size, length))

    def products(self) -> NDArray[np.float64]:
        """This rank's part of a.b, a.a and b.b for each tensor and each pair: (tensors, pairs, 3)."""
        pairs = list(zip(self.vectors[::2], self.vectors[1::2], strict=False))
        found = np.zeros((len(self.pieces), len(pairs), 3))
        with np.errstate(all="ignore"):
            for row, piece in zip(found, self.pieces, strict=True):
                for at, (one, other) in enumerate(pairs):
                    row[at] = _dots(one[piece], other[piece])
        return found

    def merge(self, products: NDArray[np.float64]) -> None:
        """Replace each pair by its adaptive sum. products: as from products(), added up over all ranks."""
        with np.errstate(all="ignore"):
            for row, piece in zip(products, self.pieces, strict=True):
                for at, (dot, one_squared, other_squared) in enumerate(row.tolist()):
                    one, other = self.vectors[2 * at][piece], self.vectors[2 * at + 1][piece]
                    _add(one, other, _factor(dot, one_squared), _factor(dot, other_squared))
        self.vectors = self.vectors[::2]

    def gather(self) -> None:
        """Put the one vector that is left into the buffers of every rank."""
        mine = make_buffer(self.vectors[0].size, self._dtype)
        wide = as_buffer(np.ascontiguousarray(self.vectors[0]))
        self._transport.arithmetic.cast(mine, wide)
        gathered = self._transport.allgather(mine, self._counts)
        start = 0
        for buffer in self._buffers:
            self._transport.arithmetic.copy(buffer, gathered.slice(start, start + buffer.count))
            start += buffer.count


def _widen(arithmetic: Arithmetic, buffer: Buffer) -> Array:
    """The buffer's numbers in the dtype that they are combined in; the same memory where that is their own."""
    if buffer.dtype not in HALF:
        return buffer.array
    wide = make_buffer(buffer.count, "float32")
    arithmetic.cast(wide, buffer)
    return wide.array


def _dots(one: NDArray[Any], other: NDArray[Any]) -> tuple[float, float, float]:
    dot = one_squared = other_squared = 0.0
    for start in range(0, one.size, _CHUNK):
        a = one[start : start + _CHUNK].astype(STORAGE["float64"])
        b = other[start : start + _CHUNK].astype(STORAGE["float64"])
        dot += float(a @ b)
        one_squared += float(a @ a)
        other_squared += float(b @ b)
    return dot, one_squared, other_squared


def _add(one: NDArray[Any], other: NDArray[Any], one_factor: float, other_factor: float) -> None:
    """one = one_factor * one + other_factor * other. In float64: a tiny vector's factor may be no float32."""
    for start in range(0, one.size, _CHUNK):
        a, b = one[start : start + _CHUNK], other[start : start + _CHUNK]
        a[:] = a.astype(STORAGE["float64"]) * one_factor + b.astype(STORAGE["float64"]) * other_factor


def _factor(dot: float, squared: float) -> float:
    """What a vector is multiplied by: 1/2 if the other equals it, 1 if the other is orthogonal to it, or it is zero."""
    return 1.0 - dot / (2.0 * squared) if squared else 1.0
