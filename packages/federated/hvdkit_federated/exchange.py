"""Communication of a round between ranks: short messages to all ranks, and sums of vectors."""

from __future__ import annotations

import json
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdkit.engine.api import (
    ProcessSet,
    Sum,
    as_buffer,
    broadcast_bytes,
    collective_step,
    do,
    gather_bytes,
    group_of,
    reduce_options,
)


class RoundCollectives(Protocol):
    """Collectives of a round, called by all ranks in one order."""

    rank: int
    size: int

    def gather(self, kind: str, message: Any) -> list[Any]:
        """Gather every rank's message, in rank order.

        message: a value that JSON can hold. kind: the same on all ranks.
        """

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """Sum every rank's array (n,); integers wrap."""

    def broadcast(self, array: NDArray[Any]) -> NDArray[Any]:
        """Broadcast rank 0's array (n,)."""


class EngineCollectives:
    """An Exchange among the ranks of a process set, on hvdkit's engine."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._group = group_of(process_set, "Federation.round()")
        self.rank, self.size = self._group.transport.rank, self._group.transport.size

    def gather(self, kind: str, message: Any) -> list[Any]:
        data = json.dumps(message).encode()
        gathered = collective_step(
            self._group.engine, "federated", lambda transport, _: gather_bytes(transport, data), name=kind
        )
        return [json.loads(each) for each in gathered]

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        total = np.array(array)
        name = total.dtype.name
        options = reduce_options([name], Sum, 1.0, 1.0, "Federation.round()")
        do(self._group, "allreduce", "federated", [(name, total.shape)], [as_buffer(total)], options)
        return total

    def broadcast(self, array: NDArray[Any]) -> NDArray[Any]:
        sent = collective_step(
            self._group.engine,
            "federated",
            lambda transport, _: broadcast_bytes(transport, array.tobytes(), 0),
            name="broadcast",
        )
        return np.frombuffer(sent, array.dtype).copy()
