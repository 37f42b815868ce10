"""What reductions in steps are made of: collectives that are begun now and asked after later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdkit.transport.base import Buffer, Op


class Request(Protocol):
    """A collective under way."""

    def test(self) -> bool:
        """Is it done? Only asks. Raises TransportError (RankLostError where the dead rank is known) if it failed."""


class Wire(Protocol):
    """The ranks of a group, and a way of their own to begin collectives: in the same order on all ranks.

    The memory that a request uses is left alone until it is done.
    """

    rank: int
    size: int

    @property
    def largest_count(self) -> int:
        """How many elements one collective may move."""

    def can_reduce(self, dtype: str) -> bool:
        """Can allreduce add up this dtype?"""

    def allreduce(self, source: Buffer, out: Buffer, op: Op) -> Request:
        """Reduce `source` (n,) into `out` (n,); they may be the same memory, else `source` is only read."""

    def alltoall(
        self, sent: Buffer, send_counts: Sequence[int], received: Buffer, receive_counts: Sequence[int]
    ) -> Request:
        """Send the i-th piece of `sent` to rank i; what comes from rank i is the i-th piece of `received`."""

    def allgather(self, gathered: Buffer, counts: Sequence[int]) -> Request:
        """Fill all pieces of `gathered` (sum(counts),), of which this rank has its own in place."""

    def close(self, *, idle: bool = True) -> None:
        """Give it back; collective. idle: False if a request failed, or was not waited for."""
