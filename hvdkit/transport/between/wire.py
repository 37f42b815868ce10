"""What reductions in steps are made of: collectives that are begun now and asked after later, and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdkit.transport.buffer import Buffer, Op
from hvdkit.transport.request import Request


class Pending:
    """Counts the messages that somebody waits for."""

    def __init__(self) -> None:
        self.count = 0

    def wake(self) -> None:
        """Called by turn() when the last of them is done."""


class Messages(Protocol):
    """Messages between two ranks, sent and received in the background.

    The memory of one is left alone until it is no longer pending.
    """

    def send(self, buffer: Buffer, peer: int, tag: int, pending: Pending) -> None:
        """Begin to send. tag: below TAGS; messages from one rank to another with the same tag arrive in order."""

    def receive(self, buffer: Buffer, peer: int, tag: int, pending: Pending) -> None:
        """Begin to receive just so many numbers."""

    def turn(self) -> None:
        """Take note of what is done. Raises TransportError (RankLostError where it is known) if something failed."""


class Wire(Protocol):
    """The ranks of a group, and a way of their own to begin collectives: in the same order on all ranks.

    The memory that a request uses is left alone until it is done.
    messages: None where there are collectives only.
    """

    rank: int
    size: int
    messages: Messages | None

    @property
    def largest_count(self) -> int:
        """How many elements one collective may move."""

    def can_reduce(self, dtype: str) -> bool:
        """Can allreduce add up this dtype?"""

    def can_scatter(self, dtype: str) -> bool:
        """Can reducescatter add up this dtype?"""

    def allreduce(self, source: Buffer, out: Buffer, op: Op) -> Request:
        """Reduce `source` (n,) into `out` (n,); they may be the same memory, else `source` is only read."""

    def reducescatter(self, source: Buffer, out: Buffer, counts: Sequence[int], op: Op) -> Request:
        """Reduce `source` (sum(counts),); rank i gets the i-th piece in its `out` (counts[i],)."""

    def alltoall(
        self, sent: Buffer, send_counts: Sequence[int], received: Buffer, receive_counts: Sequence[int]
    ) -> Request:
        """Send the i-th piece of `sent` to rank i; what comes from rank i is the i-th piece of `received`."""

    def allgather(self, gathered: Buffer, counts: Sequence[int], own: Buffer | None = None) -> Request:
        """Fill all pieces of `gathered` (sum(counts),). own: this rank's piece; None if it is in its place already."""

    def broadcast(self, buffer: Buffer, root: int) -> Request:
        """Fill `buffer` (n,) with the root's."""

    def barrier(self) -> Request:
        """Is done when every rank has called it."""

    def close(self, *, idle: bool = True) -> None:
        """Give it back; collective. idle: False if a request failed, or was not waited for."""
