"""Python objects between ranks: pickled, inside the job only."""

from __future__ import annotations

import pickle
from typing import Any

from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import gather_bytes


def pack(value: Any) -> bytes:
    """The object (anything that can be pickled) as bytes."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """The object that was packed."""
    return pickle.loads(data)


def allgather_object(transport: Transport, value: Any) -> list[Any]:
    """Give every rank the list of all ranks' values (anything that can be pickled), in rank order; collective."""
    return [unpack(data) for data in gather_bytes(transport, pack(value))]
