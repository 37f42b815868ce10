"""Enqueues the collectives of named operations on a communicator, by NCCL's operations or combinations of them.

A factor is multiplied with each rank's numbers before the sum, in their dtype. No function here makes the host wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hvdkit.transport.buffer import COMPLEX, FLOATS, Buffer
from hvdkit.transport.nccl.communicator import Communicator
from hvdkit.transport.nccl.library import BYTES, OPERATIONS, REDUCIBLE, as_reals

#: A bool is a byte of 0 or 1: op on bools -> op on bytes.
_OF_BOOLS = {"sum": "max", "max": "max", "product": "min", "min": "min"}
_MOST_TOGETHER = 32  # limit of allreduces in one operation (group call) of NCCL


def can_reduce(dtype: str, op: str, *, scaled: bool) -> bool:
    """Return whether NCCL can do this reduction. op: an Op, "average" or "adasum". scaled: with a factor other than 1.

    NCCL cannot reduce int16, uint16 and float8; it has no averages and factors of integers, no factors of min, max and
    product, and no complex products.
    """
    if op not in ("sum", "average"):
        return op in OPERATIONS and not scaled and (dtype == "bool" or dtype in REDUCIBLE)
    if dtype == "bool":
        return op == "sum" and not scaled
    if dtype in FLOATS or dtype in COMPLEX:
        return True
    return dtype in REDUCIBLE and op == "sum" and not scaled


class Reduction:
    """A reduction in NCCL's constants. factor: for each rank's numbers before a sum; includes an average's division.

    dtype: ncclDataType_t. width: number of values of this type in an element. op: ncclRedOp_t.
    """

    def __init__(self, communicator: Communicator, dtype: str, op: str, factor: float) -> None:
        name, self.width = as_reals(dtype)
        if dtype == "bool":
            self.dtype, self.op = BYTES, OPERATIONS[_OF_BOOLS[op]]
        elif op in ("sum", "average"):
            self.dtype, self.op = REDUCIBLE[name], communicator.scaled_sum(name, factor)
        else:
            self.dtype, self.op = REDUCIBLE[name], OPERATIONS[op]


def all_reduce(
    communicator: Communicator, stream: int, buffers: Sequence[Buffer], reductions: Sequence[Reduction]
) -> None:
    """Reduce buffers in place; many small buffers become one operation of NCCL."""
    pairs = [pair for pair in zip(buffers, reductions, strict=True) if pair[0].count]
    for first in range(0, len(pairs), _MOST_TOGETHER):
        with communicator.grouped():
            for buffer, how in pairs[first : first + _MOST_TOGETHER]:
                address, count = buffer.pointer, buffer.count * how.width
                communicator.all_reduce(address, address, count, how.dtype, how.op, stream)


def broadcast(communicator: Communicator, stream: int, buffer: Buffer, root: int) -> None:
    """Overwrite the buffer with the root's buffer."""
    if buffer.count:
        communicator.broadcast(buffer.pointer, buffer.pointer, buffer.nbytes, root, stream)


def all_gather(communicator: Communicator, stream: int, source: Buffer, result: Buffer, counts: Sequence[int]) -> None:
    """Concatenate all ranks' sources in the result.

    communicator: NCCL's communicator of the ranks.
    stream: the stream for the operation.
    source: (counts[rank],), this rank's numbers.
    result: (sum(counts),).
    counts: elements of each rank.
    """
    if not sum(counts):
        return
    if len(set(counts)) == 1:
        communicator.all_gather(source.pointer, result.pointer, source.nbytes, BYTES, stream)
        return
    # NCCL has no gather of different counts, so broadcasts of all ranks are grouped as one operation.
    with communicator.grouped():
        for rank, (start, count) in enumerate(zip(_starts(counts), counts, strict=True)):
            if count:
                target = result.pointer + start * result.itemsize
                given = source.pointer if rank == communicator.rank else target
                communicator.broadcast(given, target, count * result.itemsize, rank, stream)


def all_to_all(
    communicator: Communicator,
    stream: int,
    source: Buffer,
    result: Buffer,
    sent: Sequence[int],
    received: Sequence[int],
) -> None:
    """Send the i-th slice of the source to rank i, and receive the i-th slice of the result from rank i.

    communicator: NCCL's communicator of the ranks.
    stream: the stream for the operation.
    source: (sum(sent),).
    result: (sum(received),).
    sent: elements for each rank.
    received: elements from each rank.
    """
    communicator.all_to_all(_pieces(source, sent), _pieces(result, received), stream)


def reduce_scatter(
    communicator: Communicator,
    stream: int,
    source: Buffer,
    result: Buffer,
    counts: Sequence[int],
    how: Reduction,
) -> None:
    """Reduce the source, and write this rank's slice to the result.

    communicator: NCCL's communicator of the ranks.
    stream: the stream for the operation.
    source: (sum(counts),).
    result: (counts[rank],).
    counts: elements of each rank's slice.
    how: the reduction.
    """
    if not sum(counts):
        return
    if len(set(counts)) == 1:
        count = counts[0] * how.width
        communicator.reduce_scatter(source.pointer, result.pointer, count, how.dtype, how.op, stream)
        return
    with communicator.grouped():
        for root, (start, count) in enumerate(zip(_starts(counts), counts, strict=True)):
            if count:
                part = source.pointer + start * source.itemsize
                target = result.pointer if root == communicator.rank else part  # not written on other ranks
                communicator.reduce(part, target, count * how.width, how.dtype, how.op, root, stream)


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][:-1]


def _pieces(buffer: Buffer, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the address and bytes of each slice of a buffer."""
    size = buffer.itemsize
    return [(buffer.pointer + start * size, count * size) for start, count in zip(_starts(counts), counts, strict=True)]
