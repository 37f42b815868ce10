"""Python objects between ranks: pickled, inside the job only."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

from hvdkit.transport.base import Transport
from hvdkit.transport.small import broadcast_bytes, gather_bytes

T = TypeVar("T")


def broadcast_object(transport: Transport, value: T, root: int) -> T:
    """Give every rank a copy of root's `value` (anything that can be pickled); collective. Root keeps its own."""
    if transport.rank == root:
        broadcast_bytes(transport, pickle.dumps(value, pickle.HIGHEST_PROTOCOL), root)
        return value
    return pickle.loads(broadcast_bytes(transport, b"", root))  # type: ignore[no-any-return]


def allgather_object(transport: Transport, value: Any) -> list[Any]:
    """Give every rank the list of all ranks' values (anything that can be pickled), in rank order; collective."""
    return [pickle.loads(data) for data in gather_bytes(transport, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))]
