"""The interface of a transport, which moves bytes inside a fixed group of ranks.

Collectives are called in the same order on all ranks of the group. This module does not depend on a framework: numbers
come in a Buffer, and an Arithmetic adds and casts them: numpy's, or that of an adapter.
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
    """Moves bytes inside a fixed group of ranks. Each implementation is a file.

    Every method is collective unless its docstring states the opposite: all ranks of the group call it, in the same
    order, with arguments that agree, from one thread at a time. Methods raise TransportError (RankLostError if the dead
    rank is known) when the other ranks cannot be reached. If a signal handler ends a collective by an exception, the
    ranks may be out of step, and the group cannot be used any more. This does not concern named operations, because
    the engine's thread does them.

    isend() and ireceive() return at once. The messages that a thread has begun progress in all waits of this thread;
    no message may be in flight when a group is closed.

    name: name of the transport, for messages.
    backend: moves bytes between ranks that share no memory: "mpi", "gloo", or "none" for one rank.
    rank: this process's number in the group, from 0.
    size: number of ranks in the group.
    local_ranks: largest number of ranks that are summed inside a host before the sum crosses to other hosts (1 if none
    are); the same on all ranks.
    shards: largest number of shards of a sum that cross to other hosts at the same time: the smallest number of ranks
    on a host.
    arithmetic: adds and casts the numbers.
    between: the algorithm of sums between hosts, and the measurements for its choice; None if nothing crosses.
    """

    name: str
    backend: str
    rank: int
    size: int
    local_ranks: int = 1
    shards: int = 1
    arithmetic: Arithmetic
    between: BetweenHosts | None = None
    #: True if check() detects ranks that have ended.
    checks_ranks: bool = False

    @abstractmethod
    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        """Replace `buffer` (n,) by scale * the element-wise reduction over all ranks, in place.

        scale: 1.0 for integer and bool buffers; applied before float16 and bfloat16 are rounded.
        """

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        """Reduce `buffer` (sum(counts),) over all ranks; rank i gets the i-th slice, (counts[i],), in new memory.

        Raises ValueError for counts that do not fit the buffer, as all methods with counts do. In the default
        implementation each rank receives the other ranks' slices for it and adds them up.
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
        """Fill `buffer` (n,) with the root's buffer, in place. Raises ValueError if `root` is not a rank."""

    @abstractmethod
    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        """Send the i-th slice of `buffer` (sum(send_counts),) to rank i; return the received (sum(receive_counts),)."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    def allgather_into(self, pieces: Sequence[Buffer], buffer: Buffer) -> None:
        """Fill `pieces`, one for each rank, with every rank's `buffer` (pieces[rank].count,).

        `buffer` may be pieces[rank] itself. This and the following collectives write to memory of the caller.
        """
        self._divide(pieces, self.allgather(buffer, [piece.count for piece in pieces]))

    def reducescatter_into(self, out: Buffer, pieces: Sequence[Buffer], op: Op = "sum", scale: float = 1.0) -> None:
        """Set out (n,) to scale * the reduction of every rank's pieces[rank] (n,).

        out: may be pieces[rank] itself.
        pieces: one for each rank.
        op: the reduction.
        scale: as in allreduce(), except that 16-bit floats are rounded before scaling if ranks are on several hosts.
        """
        counts = [piece.count for piece in pieces]
        self.arithmetic.combine(out, [self.reducescatter(self._join(pieces), counts, op)], scale=scale)

    def alltoall_into(self, received: Sequence[Buffer], sent: Sequence[Buffer]) -> None:
        """Send sent[i] to rank i, and receive into received[i] from rank i. All buffers have the same dtype."""
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
        """Fill every rank's `out` (n,) with the root's pieces[rank]. pieces: empty on other ranks."""
        nothing = out.slice(0, 0)
        sent = pieces if self.rank == root else [nothing] * self.size
        self.alltoall_into([out if rank == root else nothing for rank in range(self.size)], sent)

    def _join(self, pieces: Sequence[Buffer]) -> Buffer:
        """Concatenate the pieces in new memory."""
        joined = make_buffer(sum(piece.count for piece in pieces), pieces[0].dtype)
        at = 0
        for piece in pieces:
            self.arithmetic.copy(joined.slice(at, at + piece.count), piece)
            at += piece.count
        return joined

    def _divide(self, pieces: Sequence[Buffer], joined: Buffer) -> None:
        """Copy consecutive slices of `joined` to the pieces."""
        at = 0
        for piece in pieces:
            self.arithmetic.copy(piece, joined.slice(at, at + piece.count))
            at += piece.count

    def send(self, buffer: Buffer, peer: int, tag: int = 0) -> None:
        """Send `buffer` (n,) to another rank, which must receive it; not collective. See isend()."""
        self.isend(buffer, peer, tag).wait()

    def receive(self, buffer: Buffer, peer: int, tag: int = 0) -> None:
        """Fill `buffer` (n,) with a message from another rank; not collective. See ireceive()."""
        self.ireceive(buffer, peer, tag).wait()

    def isend(self, buffer: Buffer, peer: int, tag: int = 0) -> Request:
        """Begin to send `buffer` (n,); not collective. When the request is done, the memory may be used again.

        The transport decides whether the request is done before the receiver has begun to receive. Messages between two
        ranks with the same tag arrive in the order of sending. If the receiver's buffer has another number of bytes,
        the receiver gets a TransportError.
        tag: from 0 to 32767. Raises ValueError if `peer` is not another rank of the group.
        """
        check_message(peer, tag, self.rank, self.size)
        return self.begin_message(buffer, peer, tag, sends=True)

    def ireceive(self, buffer: Buffer, peer: int, tag: int = 0) -> Request:
        """Begin to receive the next message from a rank with this tag into `buffer` (n,); not collective. See isend().

        Several requests with the same peer and tag get the messages in the order of the calls.
        """
        check_message(peer, tag, self.rank, self.size)
        return self.begin_message(buffer, peer, tag, sends=False)

    def begin_message(self, buffer: Buffer, peer: int, tag: int, *, sends: bool) -> Request:
        """Begin a message for isend() and ireceive(), which have checked the arguments."""
        raise self._without_messages()

    def _watched(self, request: Request) -> Request:
        request.check = self.check
        return request

    def _without_messages(self) -> TransportError:
        return TransportError(f"The {self.name} transport has no messages from rank to rank.")

    @abstractmethod
    def split(self, groups: Groups) -> Transport | None:
        """Make a transport for each group, and return that of this rank's group; None for a rank in no group.

        groups: disjoint groups, the same on all ranks. The transports take no descriptor, thread or mapping before
        their first collective. Raises ValueError for ranks that do not exist or appear twice.
        """

    def create_group(self, ranks: Sequence[int]) -> Transport:
        """Make a transport for these ranks; only they call this, in the same order if they make several groups.

        No other thread may split this transport or make groups meanwhile.
        """
        raise TransportError(
            f"The {self.name} transport cannot make a group without all ranks. Use hvdkit's own engine (unset "
            "HVDKIT_ENGINE)."
        )

    def open_mailbox(self) -> Mailbox:
        """Open a mailbox for short messages between these ranks; all ranks open mailboxes in the same order.

        On a transport that split() has made, this does not wait for the other ranks; messages wait for them. On any
        other transport it is collective.
        """
        raise self._without_messages()

    @abstractmethod
    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> Buckets:
        """Make the buckets of an agreed plan. depth: how many of them may be in use at a time; None for all."""

    def measure(self) -> None:  # noqa: B027  nothing, unless a transport has something to do
        """Measure which algorithms are fast between these ranks if they are on several hosts; collective."""

    def check(self) -> None:  # noqa: B027  nothing, unless a transport has something to do
        """Raise RankLostError if a rank of the group is known to have ended; called during waits, not collective."""

    def leave(self) -> None:  # noqa: B027  nothing, unless a transport has something to do
        """Announce that this rank leaves, as far as a rank can do so alone; not collective."""

    @abstractmethod
    def close(self, *, idle: bool = True) -> None:
        """Release all resources. Later calls of other methods are errors; closing twice is allowed.

        idle: False if ranks are lost and cannot be reached any more; the call is not collective then.
        """


def check_counts(call: str, counts: Sequence[int], size: int, *, total: int | None) -> None:
    """Raise ValueError unless `counts` has a count from 0 up for each rank, with the sum `total` (any sum if None).

    call: the collective's name, for the message.
    counts: elements for each rank.
    size: number of ranks.
    total: number of elements of the buffer.
    """
    if len(counts) != size or any(count < 0 for count in counts):
        raise ValueError(f"{call}: counts is {list(counts)}; it must be {size} numbers from 0 up, one for each rank")
    if total is not None and sum(counts) != total:
        raise ValueError(f"{call} has {total} elements, but the counts {list(counts)} add up to {sum(counts)}")


def check_alltoall(send: Sequence[int], receive: Sequence[int], rank: int, size: int, *, total: int) -> None:
    """Raise ValueError if the counts of an alltoall do not fit the buffer, or each other for this rank itself.

    send: elements for each rank.
    receive: elements from each rank.
    rank: this rank.
    size: number of ranks.
    total: number of elements of the buffer.
    """
    check_counts("alltoall", send, size, total=total)
    check_counts("alltoall", receive, size, total=None)
    if send[rank] != receive[rank]:
        raise ValueError(f"alltoall: rank {rank} sends {send[rank]} elements to itself but expects {receive[rank]}")


def check_root(root: int, size: int) -> None:
    """Raise ValueError if `root` is not a rank."""
    if not 0 <= root < size:
        raise ValueError(f"root is {root}; it must be a rank from 0 to {size - 1}")


#: The number of tags of messages: MPI guarantees that many.
TAGS = 32768


def check_message(peer: int, tag: int, rank: int, size: int) -> None:
    """Raise ValueError unless `peer` is another rank of the group and `tag` is a valid tag."""
    if not 0 <= peer < size or peer == rank:
        raise ValueError(f"peer is {peer}; it must be a rank from 0 to {size - 1} other than this one, {rank}")
    if not 0 <= tag < TAGS:
        raise ValueError(f"tag is {tag}; it must be from 0 to {TAGS - 1}")
