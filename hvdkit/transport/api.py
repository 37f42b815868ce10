"""The interface of a transport: moving bytes inside a fixed group of ranks.

Collectives are called in the same order on all ranks of the group. Nothing here knows a framework: numbers come as a
Buffer, and what is done with them (adding, casting) is an Arithmetic: numpy's, or one that an adapter brings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdkit.errors import TransportError
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buckets import Buckets, BucketSpec
from hvdkit.transport.buffer import Buffer, Op, make_buffer
from hvdkit.transport.division import Groups
from hvdkit.transport.request import Request

if TYPE_CHECKING:
    from hvdkit.transport.between.select import BetweenHosts
    from hvdkit.transport.mailbox import Mailbox


class Transport(ABC):
    """Moves bytes inside a fixed group of ranks; one implementation a file.

    Every method is collective but those that say otherwise: all ranks of the group call it, in the same order, with
    arguments that agree; one thread at a time. Raises TransportError (RankLostError where the dead rank is known) when
    the others cannot be reached. A collective that a signal's handler ends by an error may leave the ranks out of step:
    the group cannot be used any more. Named operations are not concerned, as the engine's thread does them.

    isend() and ireceive() return at once. The messages that a thread has begun go on in its waits of any kind; none is
    under way when a group is closed.

    backend: what moves bytes where ranks share no memory: "mpi", "gloo", or "none" for one rank.
    local_ranks: how many ranks at most are summed inside a host before the sum crosses to others (1 where nothing is),
    the same number on all ranks. shards: into how many parts, at most, a sum is divided that cross to other hosts at
    once: as many as every host has ranks. between: the algorithm of sums between hosts, and what was measured there;
    None where nothing crosses.
    """

    name: str
    backend: str
    rank: int
    size: int
    local_ranks: int = 1
    shards: int = 1
    arithmetic: Arithmetic
    between: BetweenHosts | None = None
    #: Does check() look whether ranks have ended?
    checks_ranks: bool = False

    @abstractmethod
    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        """Replace `buffer` (n,) by scale * the element-wise reduction over all ranks, in place.

        scale: 1.0 for integer and bool buffers; applied before float16 and bfloat16 are rounded.
        """

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        """Reduce `buffer` (sum(counts),) over all ranks; rank i gets the i-th piece, (counts[i],), in new memory.

        Raises ValueError for counts that do not fit the buffer, as all methods with counts do. By default each rank
        gets the others' pieces and adds them up.
        """
        received = self.alltoall(buffer, counts, [counts[self.rank]] * self.size)
        result = make_buffer(counts[self.rank], buffer.dtype)
        pieces = [received.slice(at * result.count, (at + 1) * result.count) for at in range(self.size)]
        self.arithmetic.combine(result, pieces, op)
        return result

    @abstractmethod
    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        """Concatenate every rank's `buffer` (counts[rank],) in rank order into new memory, (sum(counts),)."""

    @abstractmethod
    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Fill `buffer` (n,) with the root's, in place. Raises ValueError for a root that is no rank."""

    @abstractmethod
    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        """Send the i-th piece of `buffer` (sum(send_counts),) to rank i; returns what came, (sum(receive_counts),)."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    def allgather_into(self, pieces: Sequence[Buffer], buffer: Buffer) -> None:
        """Fill `pieces`, one a rank, with every rank's `buffer` (pieces[rank].count,), which may be that piece.

        This and the next ones are collectives whose results go to memory that the caller has.
        """
        self._divide(pieces, self.allgather(buffer, [piece.count for piece in pieces]))

    def reducescatter_into(self, out: Buffer, pieces: Sequence[Buffer], op: Op = "sum", scale: float = 1.0) -> None:
        """out (n,) = scale * the reduction of every rank's pieces[rank] (n,); it may be this rank's piece.

        scale: as in allreduce(). Other than there 16-bit floats are rounded before it where ranks are on several hosts.
        """
        counts = [piece.count for piece in pieces]
        self.arithmetic.combine(out, [self.reducescatter(self._join(pieces), counts, op)], scale=scale)

    def alltoall_into(self, received: Sequence[Buffer], sent: Sequence[Buffer]) -> None:
        """Send sent[i] to rank i; what rank i sends comes to received[i]. Buffers, one a rank, agree in dtype."""
        counts = [piece.count for piece in sent], [piece.count for piece in received]
        self._divide(received, self.alltoall(self._join(sent), *counts))

    def gather_into(self, pieces: Sequence[Buffer], buffer: Buffer, root: int) -> None:
        """Fill the root's `pieces`, one a rank, with every rank's `buffer` (n,). pieces: empty on other ranks."""
        each = [buffer.count if self.rank == root else 0] * self.size
        sent = [buffer.count if rank == root else 0 for rank in range(self.size)]
        gathered = self.alltoall(buffer, sent, each)
        if self.rank == root:
            self._divide(pieces, gathered)

    def scatter_into(self, out: Buffer, pieces: Sequence[Buffer], root: int) -> None:
        """Fill every rank's `out` (n,) with the root's piece for it. pieces: empty on other ranks."""
        nothing = out.slice(0, 0)
        sent = pieces if self.rank == root else [nothing] * self.size
        self.alltoall_into([out if rank == root else nothing for rank in range(self.size)], sent)

    def _join(self, pieces: Sequence[Buffer]) -> Buffer:
        """The pieces one after another, in new memory."""
        joined = make_buffer(sum(piece.count for piece in pieces), pieces[0].dtype)
        at = 0
        for piece in pieces:
            self.arithmetic.copy(joined.slice(at, at + piece.count), piece)
            at += piece.count
        return joined

    def _divide(self, pieces: Sequence[Buffer], joined: Buffer) -> None:
        """Copy what is one after another to the pieces."""
        at = 0
        for piece in pieces:
            self.arithmetic.copy(piece, joined.slice(at, at + piece.count))
            at += piece.count

    def send(self, buffer: Buffer, peer: int, tag: int = 0) -> None:
        """Send `buffer` (n,) to another rank, which receives it; not collective. See isend()."""
        self.isend(buffer, peer, tag).wait()

    def receive(self, buffer: Buffer, peer: int, tag: int = 0) -> None:
        """Fill `buffer` (n,) with what another rank sends; not collective. See ireceive()."""
        self.ireceive(buffer, peer, tag).wait()

    def isend(self, buffer: Buffer, peer: int, tag: int = 0) -> Request:
        """Begin to send `buffer` (n,); not collective. When it is done the memory may be used again.

        Whether that waits for the receiver is the transport's choice. Messages between two ranks with the same tag
        arrive in the order of sending; the receiver's buffer has the same number of bytes, else it gets a
        TransportError. tag: from 0 to 32767. Raises ValueError for a peer that is no other rank of the group.
        """
        check_message(peer, tag, self.rank, self.size)
        return self.begin_message(buffer, peer, tag, sends=True)

    def ireceive(self, buffer: Buffer, peer: int, tag: int = 0) -> Request:
        """Begin to receive the next message from a rank with this tag into `buffer` (n,); not collective. See isend().

        Several with one peer and tag are filled in the order of these calls.
        """
        check_message(peer, tag, self.rank, self.size)
        return self.begin_message(buffer, peer, tag, sends=False)

    def begin_message(self, buffer: Buffer, peer: int, tag: int, *, sends: bool) -> Request:
        """What isend() and ireceive() do once they have checked their arguments."""
        raise self._without_messages()

    def _watched(self, request: Request) -> Request:
        request.check = self.check
        return request

    def _without_messages(self) -> TransportError:
        return TransportError(f"The {self.name} transport has no messages from rank to rank.")

    @abstractmethod
    def split(self, groups: Groups) -> Transport | None:
        """The transport of the group that this rank is in; None on ranks in none. One call makes all groups.

        groups: disjoint ones, the same on all ranks. The transports take no descriptor, thread or mapping before their
        first collective. Raises ValueError for ranks that are not there or come twice.
        """

    def create_group(self, ranks: Sequence[int]) -> Transport:
        """A transport of these ranks, who alone call it, in the same order where they make several.

        No other thread splits this transport or makes groups meanwhile.
        """
        raise TransportError(
            f"The {self.name} transport cannot make a group without all ranks. Use hvdkit's own engine (unset "
            "HVDKIT_ENGINE)."
        )

    def open_mailbox(self) -> Mailbox:
        """Make a way to send short messages between these ranks, in the same order on all of them.

        Of a transport that split() has made: it does not wait for the other ranks, messages do. Else collective.
        """
        raise self._without_messages()

    @abstractmethod
    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> Buckets:
        """Make the buckets of an agreed plan, of which `depth` may be in use at a time; all of them if None."""

    def measure(self) -> None:  # noqa: B027  nothing, unless a transport has something to do
        """Find out what is fast between these ranks, where they stand on different hosts; collective."""

    def check(self) -> None:  # noqa: B027  nothing, unless a transport has something to do
        """Raise RankLostError if a rank of the group is known to have ended; asked while waiting, not collective."""

    def leave(self) -> None:  # noqa: B027  nothing, unless a transport has something to do
        """Tell the others, as far as that can be done alone, that this rank takes no further part; not collective."""

    @abstractmethod
    def close(self, *, idle: bool = True) -> None:
        """Give everything back. Later calls of other methods are errors; closing twice is not.

        idle: False if ranks are lost, so that nothing can be said to the others any more; then not collective.
        """


def check_counts(call: str, counts: Sequence[int], size: int, *, total: int | None) -> None:
    """Raise ValueError unless there is one count from 0 up per rank, together `total` elements (any number if None)."""
    if len(counts) != size or any(count < 0 for count in counts):
        raise ValueError(f"{call}: counts is {list(counts)}; it must be {size} numbers from 0 up, one for each rank")
    if total is not None and sum(counts) != total:
        raise ValueError(f"{call} has {total} elements, but the counts {list(counts)} add up to {sum(counts)}")


def check_alltoall(send: Sequence[int], receive: Sequence[int], rank: int, size: int, *, total: int) -> None:
    """The same for alltoall: counts fit a buffer of `total` elements, and each other where a rank sends to itself."""
    check_counts("alltoall", send, size, total=total)
    check_counts("alltoall", receive, size, total=None)
    if send[rank] != receive[rank]:
        raise ValueError(f"alltoall: rank {rank} sends {send[rank]} elements to itself but expects {receive[rank]}")


def check_root(root: int, size: int) -> None:
    """Raise ValueError for a root that is none of the ranks."""
    if not 0 <= root < size:
        raise ValueError(f"root is {root}; it must be a rank from 0 to {size - 1}")


#: Tags of messages: as many as every MPI has.
TAGS = 32768


def check_message(peer: int, tag: int, rank: int, size: int) -> None:
    """Raise ValueError unless these are another rank of the group, and a tag."""
    if not 0 <= peer < size or peer == rank:
        raise ValueError(f"peer is {peer}; it must be a rank from 0 to {size - 1} other than this one, {rank}")
    if not 0 <= tag < TAGS:
        raise ValueError(f"tag is {tag}; it must be from 0 to {TAGS - 1}")
