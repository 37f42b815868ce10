"""Collectives on more elements than a wire counts, in several calls, as steps of a StepQueue.

MPI counts elements in 32 bits, and Open MPI 5 has no large counts (MPI-4's functions with _c). So a gather is a
broadcast of each rank's piece, and a reduce-scatter and an exchange go in rounds through memory in which the parts of a
round lie close together. All ranks must take the same way: where they know different counts they ask each other first.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.between.collectives import combine_pieces, until_done
from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import Buffer, Op, make_buffer

_ROUND_BYTES = 64 * 2**20  # of a rank's numbers in one round


def allgather(wire: Wire, own: Buffer, gathered: Buffer, counts: Sequence[int]) -> Iterator[bool]:
    """Fill `gathered` (sum(counts),) with all ranks' `own` (counts[rank],); counts are the same on all ranks."""
    if gathered.count <= wire.largest_count:
        yield from until_done(wire.allgather(gathered, counts, own), free=True)
        return
    for root, piece in enumerate(_pieces_of(gathered, counts)):
        if root == wire.rank:
            np.copyto(piece.array, own.array)
        yield from broadcast(wire, piece, root, free=False)


def broadcast(wire: Wire, buffer: Buffer, root: int, *, free: bool = True) -> Iterator[bool]:
    """Fill `buffer` (n,) with the root's. free: what is yielded once the last collective has been posted."""
    for start in range(0, buffer.count, wire.largest_count):
        stop = min(start + wire.largest_count, buffer.count)
        yield from until_done(wire.broadcast(buffer.slice(start, stop), root), free=free and stop == buffer.count)


def reducescatter(
    wire: Wire, buffer: Buffer, out: Buffer, counts: Sequence[int], op: Op, arithmetic: Arithmetic
) -> Iterator[bool]:
    """Reduce `buffer` (sum(counts),); rank i gets the i-th piece in `out` (counts[i],)."""
    if not wire.can_scatter(buffer.dtype):
        received = make_buffer(out.count * wire.size, buffer.dtype)
        yield from _exchange(wire, buffer, counts, received, [out.count] * wire.size, buffer.count, max(counts))
        combine_pieces(out, received, BucketSpec(buffer.dtype, out.count, op), arithmetic)
    elif buffer.count <= wire.largest_count:
        yield from until_done(wire.reducescatter(buffer, out, counts, op), free=True)
    else:
        step = _round_step(wire, buffer)
        for start in range(0, max(counts), step):
            packed, parts = _pack(_pieces_of(buffer, counts), start, step)
            target = out.slice(start, start + step)
            yield from until_done(wire.reducescatter(packed, target, parts, op), free=False)


def alltoall(
    wire: Wire, sent: Buffer, send_counts: Sequence[int], received: Buffer, receive_counts: Sequence[int]
) -> Iterator[bool]:
    """Send the i-th piece of `sent` to rank i, and fill `received` with what comes."""
    total, longest = max(sent.count, received.count), max(*send_counts, *receive_counts)
    if wire.largest_count < sys.maxsize:
        largest = Buffer(np.array([total, longest], np.int64), "int64")
        yield from until_done(wire.allreduce(largest, largest, "max"), free=False)
        total, longest = largest.array.tolist()
    yield from _exchange(wire, sent, send_counts, received, receive_counts, total, longest)


def _exchange(
    wire: Wire,
    sent: Buffer,
    send_counts: Sequence[int],
    received: Buffer,
    receive_counts: Sequence[int],
    total: int,
    longest: int,
) -> Iterator[bool]:
    """See alltoall. total, longest: the largest buffer and the largest piece of any rank."""
    if total <= wire.largest_count:
        yield from until_done(wire.alltoall(sent, send_counts, received, receive_counts), free=True)
        return
    step = _round_step(wire, sent)
    for start in range(0, longest, step):
        packed, parts = _pack(_pieces_of(sent, send_counts), start, step)
        targets = [piece.slice(start, start + step) for piece in _pieces_of(received, receive_counts)]
        counts = [target.count for target in targets]
        arrived = make_buffer(sum(counts), sent.dtype)
        yield from until_done(wire.alltoall(packed, parts, arrived, counts), free=False)
        for target, piece in zip(targets, _pieces_of(arrived, counts), strict=True):
            np.copyto(target.array, piece.array)


def _round_step(wire: Wire, buffer: Buffer) -> int:
    """How many elements of each rank's piece go in one round."""
    return max(1, min(wire.largest_count, _ROUND_BYTES // buffer.array.itemsize) // wire.size)


def _pack(pieces: Sequence[Buffer], start: int, step: int) -> tuple[Buffer, list[int]]:
    """The parts of a round one after another in new memory, and their counts."""
    parts = [piece.slice(start, start + step) for piece in pieces]
    return Buffer(np.concatenate([part.array for part in parts]), parts[0].dtype), [part.count for part in parts]


def _pieces_of(buffer: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """The buffer as one piece per rank, one after another; views."""
    ends = np.cumsum([0, *counts]).tolist()
    return [buffer.slice(start, end) for start, end in itertools.pairwise(ends)]
