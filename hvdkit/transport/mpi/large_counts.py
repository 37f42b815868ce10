"""MPI's collectives with pieces on more elements than MPI counts in 32 bits, in several calls.

Open MPI 5 has no large counts (MPI-4's functions with _c), and displacements are 32 bits wide as well. So a gather is a
broadcast of each rank's piece, a reduce-scatter a reduction to each rank, and an exchange goes in rounds through memory
in which the parts of a round lie close together. All ranks must take the same way: where they know different counts
they ask each other first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.transport.buffer import Buffer, Op, make_buffer
from hvdkit.transport.mpi import library as mpi_library
from hvdkit.transport.mpi.library import collective, load_mpi, moved, moved_pieces, operation, plain

if TYPE_CHECKING:
    from mpi4py import MPI

_ROUND_BYTES = 64 * 2**20  # of a rank's exchange in one round


def countable(buffer: Buffer) -> Iterator[Buffer]:
    """The buffer in parts that MPI can count."""
    largest = mpi_library.LARGEST_COUNT
    return (buffer.slice(at, min(at + largest, buffer.count)) for at in range(0, buffer.count, largest))


def pieces_of(buffer: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """The buffer as one piece per rank, one after another; views."""
    ends = np.cumsum([0, *counts]).tolist()
    return [buffer.slice(start, end) for start, end in itertools.pairwise(ends)]


def allgather(comm: MPI.Intracomm, own: Buffer, gathered: Buffer, counts: Sequence[int]) -> None:
    """Fill `gathered` (sum(counts),) with all ranks' `own` (counts[rank],); counts are the same on all ranks."""
    if gathered.count <= mpi_library.LARGEST_COUNT:
        collective("MPI_Allgatherv", comm, moved(own), moved_pieces(gathered, list(counts)))
        return
    for root, piece in enumerate(pieces_of(gathered, counts)):
        if root == comm.rank:
            np.copyto(piece.array, own.array)
        broadcast(comm, piece, root)


def broadcast(comm: MPI.Intracomm, buffer: Buffer, root: int) -> None:
    """Fill `buffer` (n,) with the root's."""
    for part in countable(buffer):
        collective("MPI_Bcast", comm, moved(part), root)


def reducescatter(comm: MPI.Intracomm, buffer: Buffer, out: Buffer, counts: Sequence[int], op: Op) -> None:
    """Reduce `buffer` (sum(counts),) to `out` (counts[rank],), of a dtype that MPI adds."""
    how = operation(op, buffer.dtype)
    if buffer.count <= mpi_library.LARGEST_COUNT:
        collective("MPI_Reduce_scatter", comm, plain(buffer), plain(out), list(counts), how)
        return
    for root, piece in enumerate(pieces_of(buffer, counts)):
        largest = mpi_library.LARGEST_COUNT
        for at in range(0, piece.count, largest):
            end = min(at + largest, piece.count)
            target = plain(out.slice(at, end)) if root == comm.rank else None
            collective("MPI_Reduce", comm, plain(piece.slice(at, end)), target, how, root)


def alltoall(
    comm: MPI.Intracomm, sent: Buffer, send_counts: Sequence[int], received: Buffer, receive_counts: Sequence[int]
) -> None:
    """Send the i-th piece of `sent` to rank i, and fill `received` with what comes."""
    largest = np.array([max(sent.count, received.count), max(*send_counts, *receive_counts)], np.int64)
    collective("MPI_Allreduce", comm, load_mpi().IN_PLACE, largest, load_mpi().MAX)
    total, longest = largest.tolist()
    if total <= mpi_library.LARGEST_COUNT:
        pieces = moved_pieces(sent, list(send_counts)), moved_pieces(received, list(receive_counts))
        collective("MPI_Alltoallv", comm, *pieces)
        return
    most = min(mpi_library.LARGEST_COUNT, _ROUND_BYTES // sent.array.itemsize)
    step = max(1, most // comm.size)
    outgoing, incoming = pieces_of(sent, send_counts), pieces_of(received, receive_counts)
    for start in range(0, longest, step):
        parts = [piece.slice(start, start + step) for piece in outgoing]
        targets = [piece.slice(start, start + step) for piece in incoming]
        packed = Buffer(np.concatenate([part.array for part in parts]), sent.dtype)
        arrived = make_buffer(sum(target.count for target in targets), sent.dtype)
        counts = [part.count for part in parts], [target.count for target in targets]
        collective("MPI_Alltoallv", comm, moved_pieces(packed, counts[0]), moved_pieces(arrived, counts[1]))
        for target, piece in zip(targets, pieces_of(arrived, counts[1]), strict=True):
            np.copyto(target.array, piece.array)
