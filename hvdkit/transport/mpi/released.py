"""Frees communicators of buckets once all ranks have released them without an unfinished operation.

Ranks do not find out by themselves whether a reduction was given up: a rank may have finished all that it has begun
while others wait for its next bucket. If only some ranks free a communicator, MPI may give its number to a new one of
these ranks, which could then receive what the others had sent over the old one. So each rank that is idle sends
messages to the others, which no rank waits for, and frees the communicator when they show that all ranks are idle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.errors import TransportError
from hvdkit.transport.between.pipeline import EXCHANGE_TAGS
from hvdkit.transport.mpi.library import call_mpi, free_comm, load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_POLLS = 100  # before a transport is closed; the messages are under way then if all ranks are idle

_lock = threading.Lock()  # guards _released
_released: list[tuple[MPI.Intracomm, Iterator[None]]] = []


def release_comm(comm: MPI.Intracomm) -> None:
    """Free a communicator as soon as all its ranks have called this, at the latest in a call of free_released().

    Not collective, and does not wait: a communicator that some rank never releases is kept. No operation of this rank
    may be unfinished.
    """
    if not load_mpi().Is_finalized():
        with _lock:
            _released.append((comm, _meet(comm)))
        free_released()


def free_released(polls: int = 1) -> None:
    """Free the communicators that all their ranks have released, as far as this rank knows after so many polls."""
    with _lock:
        for _ in range(polls):
            if not _released or load_mpi().Is_finalized():
                return
            _released[:] = [(comm, steps) for comm, steps in _released if not _is_over(comm, steps)]


def free_before_close() -> None:
    """Call free_released() often enough for ranks that close a transport together."""
    free_released(_POLLS)


def _is_over(comm: MPI.Intracomm, steps: Iterator[None]) -> bool:
    """Advance by a step; returns True if the communicator was freed, or will never be."""
    try:
        next(steps)
    except StopIteration:
        free_comm(comm)
        return True
    except TransportError:  # a rank has ended, or the communicator was revoked
        return True
    return False


def _meet(comm: MPI.Intracomm) -> Iterator[None]:
    """Do a dissemination barrier by messages, in steps; a collective could be taken for one of a bucket.

    Source: D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier synchronization", 1988.
    """
    size, rank, distance, tag = comm.size, comm.rank, 1, EXCHANGE_TAGS
    while distance < size:
        empty = np.empty(0, np.uint8)
        requests = [
            call_mpi("MPI_Isend", comm.Isend, empty, (rank + distance) % size, tag),
            call_mpi("MPI_Irecv", comm.Irecv, empty, (rank - distance) % size, tag),
        ]
        while not all(call_mpi("MPI_Test", request.Test) for request in requests):
            yield
        distance, tag = 2 * distance, tag + 1
