"""What every transport offers: moving bytes inside a fixed group of ranks.

Collectives block and are called in the same order on all ranks of the group. Nothing here knows a framework: numbers
come as a Buffer, and what is done with them (adding, casting) is an Arithmetic: numpy's, or one that an adapter brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buckets import ALLREDUCE, Buckets, BucketSpec, Phases
from hvdkit.transport.buffer import Buffer, Op
from hvdkit.transport.division import Groups

if TYPE_CHECKING:
    from hvdkit.transport.between.select import BetweenHosts
    from hvdkit.transport.coding.api import Coder
    from hvdkit.transport.mailbox import Mailbox


class Transport(Protocol):
    """Moves bytes inside a fixed group of ranks; one implementation a file.

    Every method but the attributes is collective: all ranks of the group call it, in the same order, with arguments
    that agree. Raises TransportError (RankLostError where the dead rank is known) when the others cannot be reached.

    backend: what moves bytes where ranks share no memory: "mpi", "gloo", or "none" for one rank.
    local_ranks: how many ranks at most are summed inside a host before the sum crosses to others (1 where nothing is),
    the same number on all ranks.
    """

    name: str
    backend: str
    rank: int
    size: int
    local_ranks: int
    arithmetic: Arithmetic

    @property
    def between(self) -> BetweenHosts | None:
        """The algorithm of sums between hosts, and what was measured there; None where nothing crosses."""

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        """Replace `buffer` (n,) by scale * the element-wise reduction over all ranks, in place.

        scale: 1.0 for integer and bool buffers; applied before float16 and bfloat16 are rounded.
        """

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        """Reduce `buffer` (sum(counts),) over all ranks; rank i gets the i-th piece, (counts[i],), in new memory."""

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        """Concatenate every rank's `buffer` (counts[rank],) in rank order into new memory, (sum(counts),)."""

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Fill `buffer` (n,) with the root's, in place."""

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        """Send the i-th piece of `buffer` (sum(send_counts),) to rank i; returns what came, (sum(receive_counts),)."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def split(self, groups: Groups) -> Transport | None:
        """The transport of the group that this rank is in; None on ranks in none. One call makes all groups.

        groups: disjoint ones, the same on all ranks. The transports take no descriptor, thread or mapping before their
        first collective. Raises ValueError for ranks that are not there or come twice.
        """

    def subgroup(self, ranks: Sequence[int]) -> Transport | None:
        """See split(): a transport of these ranks, numbered in the order given."""

    def open_mailbox(self) -> Mailbox:
        """Make a way to send short messages between these ranks, in the same order on all of them.

        Of a transport that split() has made: it does not wait for the other ranks, messages do. Else collective.
        """

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> Buckets:
        """Make the buckets of an agreed plan, of which `depth` may be in use at a time; all of them if None."""

    def measure(self) -> None:
        """Find out what is fast between these ranks, where they stand on different hosts; collective."""

    def check(self) -> None:
        """Raise RankLostError if a rank of the group is known to have ended; asked while waiting, not collective."""

    def leave(self) -> None:
        """Tell the others, as far as that can be done alone, that this rank takes no further part; not collective."""

    def close(self, *, idle: bool = True) -> None:
        """Give everything back. Later calls of other methods are errors; closing twice is not.

        idle: False if ranks are lost, so that nothing can be said to the others any more; then not collective.
        """


#: Is told how many elements, from the first on, have come so far.
Reached = Callable[[int], None]


def nothing(_: int) -> None:
    """Is told, and does nothing."""


class Crossing(Protocol):
    """Reduces between hosts, beside a transport's own collectives."""

    def __call__(
        self,
        numbers: Buffer,
        spec: BucketSpec,
        *,
        phases: Phases = ALLREDUCE,
        coder: Coder | None = None,
        before: Reached = nothing,
        after: Reached = nothing,
    ) -> Iterator[bool]:
        """Reduce `numbers` (n,) in place, prescaled already, and postscale them; steps as in SteppedBuckets.

        phases: a reduce-scatter makes the sum of shard(n), an all-gather fills in the other ranks' shards.
        coder: of spec.wire, for these numbers, where they are coded. before: called with growing counts, the last of
        them n: the first so many elements are needed now; not by an all-gather. after: the same, once the first so many
        have their results; not by a reduce-scatter.
        """

    def shard(self, count: int) -> tuple[int, int]:
        """The elements, as (start, stop), that a reduce-scatter of `count` leaves to this rank."""

    def close(self, *, idle: bool = True) -> None:
        """Give it back; collective. idle: False if a reduction was cut short."""


class BaseTransport(Transport, Protocol):
    """A transport that others are put on: it reaches ranks on any host, and knows who is where."""

    @property
    def between(self) -> BetweenHosts:
        """See Transport.between."""

    def subgroup(self, ranks: Sequence[int]) -> BaseTransport | None:
        """See Transport.subgroup."""

    def split(self, groups: Groups) -> BaseTransport | None:
        """See Transport.split."""

    def find_nodes(self) -> list[int]:
        """A number of each rank's host, the same for ranks of one host; collective."""

    def open_crossing(self) -> Crossing:
        """What reduces over these ranks in steps, where they stand on different hosts; collective."""
