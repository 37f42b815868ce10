"""The interface of a wire: nonblocking collectives and messages, on which reductions in steps are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdkit.transport.buffer import Buffer, Op
from hvdkit.transport.request import Request


class Pending:
    """Counts the messages that an operation waits for."""

    def __init__(self) -> None:
        self.count = 0

    def wake(self) -> None:
        """Continue the operation; turn() calls this when the last of the messages is done."""


class Messages(Protocol):
    """Messages between two ranks, sent and received in the background.

    The memory of a message must not be used while the message is pending.
    """

    def send(self, buffer: Buffer, peer: int, tag: int, pending: Pending) -> None:
        """Begin to send `buffer` to another rank.

        buffer: the numbers.
        peer: the receiving rank.
        tag: below TAGS; messages from one rank to another with the same tag arrive in order.
        pending: counts the message until it is done.
        """

    def receive(self, buffer: Buffer, peer: int, tag: int, pending: Pending) -> None:
        """Begin to receive a message that fills `buffer` exactly. See send()."""

    def turn(self) -> None:
        """Check for completed messages. Raises TransportError (RankLostError if the dead rank is known) on failure."""


class Wire(Protocol):
    """Begins collectives among the ranks of a group, separately from other wires, in the same order on all ranks.

    The memory that a request uses must not be used until it is done.
    messages: None if the wire has only collectives.
    """

    rank: int
    size: int
    messages: Messages | None

    @property
    def largest_count(self) -> int:
        """Return the largest number of elements of one collective."""

    def can_reduce(self, dtype: str) -> bool:
        """Return whether allreduce can add up this dtype."""

    def can_scatter(self, dtype: str) -> bool:
        """Return whether reducescatter can add up this dtype."""

    def allreduce(self, source: Buffer, out: Buffer, op: Op) -> Request:
        """Reduce `source` (n,) into `out` (n,); they may be the same memory, else `source` is only read."""

    def reducescatter(self, source: Buffer, out: Buffer, counts: Sequence[int], op: Op) -> Request:
        """Reduce `source` (sum(counts),); rank i gets the i-th slice in its `out` (counts[i],)."""

    def alltoall(
        self, sent: Buffer, send_counts: Sequence[int], received: Buffer, receive_counts: Sequence[int]
    ) -> Request:
        """Send the i-th slice of `sent` to rank i, and receive the i-th slice of `received` from rank i."""

    def allgather(self, gathered: Buffer, counts: Sequence[int], own: Buffer | None = None) -> Request:
        """Fill `gathered` (sum(counts),) with all ranks' slices. own: this rank's; None if it is in `gathered`."""

    def broadcast(self, buffer: Buffer, root: int) -> Request:
        """Fill `buffer` (n,) with the root's buffer."""

    def barrier(self) -> Request:
        """Begin a barrier: the request is done when every rank has called it."""

    def close(self, *, idle: bool = True) -> None:
        """Close the wire; collective. idle: False if a request failed, or was not waited for, the same on all ranks."""

    def release(self, *, idle: bool) -> None:
        """Close the wire when all ranks have released it, without waiting for them.

        idle: False if a request of this rank failed, or was not waited for; ranks may differ in it.
        """
