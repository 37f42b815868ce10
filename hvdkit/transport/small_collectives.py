"""Collectives of single numbers, bytes and pickled objects, on any transport."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import as_buffer


def gather_ints(transport: Transport, value: int) -> list[int]:
    """Gather one int64 from every rank, in rank order; collective."""
    gathered = transport.allgather(as_buffer(np.array([value], np.int64)), [1] * transport.size)
    return [int(one) for one in gathered.array]


def gather_bytes(transport: Transport, data: bytes) -> list[bytes]:
    """Gather bytes of any length from every rank, in rank order; collective."""
    counts = gather_ints(transport, len(data))
    joined = transport.allgather(as_buffer(np.frombuffer(data, np.uint8)), counts).array.tobytes()
    ends = np.cumsum(counts).tolist()
    return [joined[end - count : end] for end, count in zip(ends, counts, strict=True)]


def broadcast_bytes(transport: Transport, data: bytes, root: int) -> bytes:
    """Return the root's bytes, of any length, on every rank; the other ranks' `data` is ignored; collective."""
    length = np.array([len(data)], np.int64)
    transport.broadcast(as_buffer(length), root)
    sent = np.empty(int(length[0]), np.uint8)
    if transport.rank == root:
        sent[:] = np.frombuffer(data, np.uint8)
    transport.broadcast(as_buffer(sent), root)
    return sent.tobytes()


def pack(value: Any) -> bytes:
    """Pickle an object for ranks of the same job."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """Return the object that pack() has pickled."""
    return pickle.loads(data)


def allgather_object(transport: Transport, value: Any) -> list[Any]:
    """Give every rank the list of all ranks' values (anything that can be pickled), in rank order; collective."""
    return [unpack(data) for data in gather_bytes(transport, pack(value))]
