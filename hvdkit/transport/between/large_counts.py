"""Blocking collectives over a wire, in several calls if the number of elements exceeds the wire's limit.

MPI counts elements in 32 bits, and Open MPI 5 has no large counts (MPI-4's functions with _c). So a large gather
broadcasts each rank's slice, and a large reduce-scatter or exchange goes in rounds through memory in which the slices
of a round are adjacent. All ranks must take the same path: if they know different counts, they first agree on the
largest.

wait: returns when a request is done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.between.collectives import combine_pieces
from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import Buffer, Op, make_buffer
from hvdkit.transport.request import Request

_ROUND_BYTES = 64 * 2**20  # bytes of a rank's numbers in one round

Wait = Callable[[Request], object]


def allgather(wire: Wire, own: Buffer, gathered: Buffer, counts: Sequence[int], wait: Wait) -> None:
    """Fill `gathered` with all ranks' `own`, in rank order; collective.

    wire: the ranks and their collectives.
    own: (counts[rank],), this rank's numbers.
    gathered: (sum(counts),), for the result.
    counts: elements of each rank; the same on all ranks.
    wait: returns when a request is done.
    """
    if gathered.count <= wire.largest_count:
        wait(wire.allgather(gathered, counts, own))
        return
    for root, piece in enumerate(gathered.pieces(counts)):
        if root == wire.rank:
            np.copyto(piece.array, own.array)
        broadcast(wire, piece, root, wait)


def broadcast(wire: Wire, buffer: Buffer, root: int, wait: Wait) -> None:
    """Fill `buffer` (n,) with the root's buffer."""
    for start in range(0, buffer.count, wire.largest_count):
        wait(wire.broadcast(buffer.slice(start, start + wire.largest_count), root))


def reducescatter(
    wire: Wire, buffer: Buffer, out: Buffer, counts: Sequence[int], op: Op, arithmetic: Arithmetic, wait: Wait
) -> None:
    """Reduce `buffer` over all ranks; rank i gets the i-th slice in `out`.

    wire: the ranks and their collectives.
    buffer: (sum(counts),), this rank's numbers.
    out: (counts[rank],), for the result.
    counts: elements of each rank's slice; the same on all ranks.
    op: the reduction.
    arithmetic: adds dtypes that the wire cannot add.
    wait: returns when a request is done.
    """
    if not wire.can_scatter(buffer.dtype):
        received = make_buffer(out.count * wire.size, buffer.dtype)
        _exchange(wire, buffer, counts, received, [out.count] * wire.size, buffer.count, max(counts), wait)
        combine_pieces(out, received, BucketSpec(buffer.dtype, out.count, op), arithmetic)
    elif buffer.count <= wire.largest_count:
        wait(wire.reducescatter(buffer, out, counts, op))
    else:
        step = _round_step(wire, buffer)
        for start in range(0, max(counts), step):
            packed, parts = _pack(buffer.pieces(counts), start, step)
            target = out.slice(start, start + step)
            wait(wire.reducescatter(packed, target, parts, op))


def alltoall(
    wire: Wire, sent: Buffer, send_counts: Sequence[int], received: Buffer, receive_counts: Sequence[int], wait: Wait
) -> None:
    """Send the i-th slice of `sent` to rank i, and receive the i-th slice of `received` from rank i.

    wire: the ranks and their collectives.
    sent: (sum(send_counts),).
    send_counts: elements for each rank.
    received: (sum(receive_counts),), for the result.
    receive_counts: elements from each rank.
    wait: returns when a request is done.
    """
    total, longest = max(sent.count, received.count), max(*send_counts, *receive_counts)
    if wire.largest_count < sys.maxsize:
        largest = Buffer(np.array([total, longest], np.int64), "int64")
        wait(wire.allreduce(largest, largest, "max"))
        total, longest = largest.array.tolist()
    _exchange(wire, sent, send_counts, received, receive_counts, total, longest, wait)


def _exchange(
    wire: Wire,
    sent: Buffer,
    send_counts: Sequence[int],
    received: Buffer,
    receive_counts: Sequence[int],
    total: int,
    longest: int,
    wait: Wait,
) -> None:
    """See alltoall(). total: elements of the largest buffer of any rank. longest: of the largest slice."""
    if total <= wire.largest_count:
        wait(wire.alltoall(sent, send_counts, received, receive_counts))
        return
    step = _round_step(wire, sent)
    for start in range(0, longest, step):
        packed, parts = _pack(sent.pieces(send_counts), start, step)
        targets = [piece.slice(start, start + step) for piece in received.pieces(receive_counts)]
        counts = [target.count for target in targets]
        arrived = make_buffer(sum(counts), sent.dtype)
        wait(wire.alltoall(packed, parts, arrived, counts))
        for target, piece in zip(targets, arrived.pieces(counts), strict=True):
            np.copyto(target.array, piece.array)


def _round_step(wire: Wire, buffer: Buffer) -> int:
    """Return the number of elements of each rank's slice in one round."""
    return max(1, min(wire.largest_count, _ROUND_BYTES // buffer.array.itemsize) // wire.size)


def _pack(pieces: Sequence[Buffer], start: int, step: int) -> tuple[Buffer, list[int]]:
    """Concatenate the elements of one round in new memory, and return them with the count of each rank."""
    parts = [piece.slice(start, start + step) for piece in pieces]
    return Buffer(np.concatenate([part.array for part in parts]), parts[0].dtype), [part.count for part in parts]
