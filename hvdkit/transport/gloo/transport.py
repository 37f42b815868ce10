"""The transport over Gloo, for worlds without MPI; peer connections carry messages and show when a rank ends."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from hvdkit.errors import HvdkitError, RankLostError, TransportError
from hvdkit.transport.addresses import address_towards
from hvdkit.transport.arithmetic import Arithmetic, NumpyArithmetic
from hvdkit.transport.between.base import BaseTransport
from hvdkit.transport.between.select import BetweenHosts
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.division import Groups, check_groups, find_group
from hvdkit.transport.gloo.connect import connect_all, listen, wait_for_listener
from hvdkit.transport.gloo.library import GlooWire, host_store_at, join_store, load_gloo
from hvdkit.transport.gloo.peers import PeerConnections, PeerMailbox, PeerMessages
from hvdkit.transport.gloo.rendezvous import (
    HttpRendezvousStore,
    Rendezvous,
    RendezvousStore,
    StoreLocation,
    TcpRendezvousStore,
    collect,
    find_peers,
)
from hvdkit.transport.gloo.store_timeout import request_from_rank_0
from hvdkit.transport.polling import Backoff, calls
from hvdkit.transport.request import MessageRequest, Request, closed_before

_START_S = 120.0
_LAST_TRY_S = 1.0  # timeout of the last attempt, for torch's error of an unreachable store
_LOSS_REPORT_S = 2.0  # limit of the wait for the report which rank's end made a collective fail

#: Counted by store: processes that were ranks of other jobs before count from 0, as new processes do.
_rendezvous_numbers: dict[str, itertools.count[int]] = defaultdict(itertools.count)


def open_rendezvous_store(place: StoreLocation, rank: int) -> tuple[RendezvousStore, str]:
    """Open the store of a launcher without MPI; also return this host's address towards it. Raises TransportError."""
    towards = address_towards(place.address)
    if place.kind == "http":
        return HttpRendezvousStore(place.address, place.port), towards
    if place.hosted and rank == 0:
        return TcpRendezvousStore(host_store_at(place.address, place.port)), towards
    deadline = time.monotonic() + _START_S
    if not place.hosted:  # it exists, unless its process has ended: torch's own wait cannot be interrupted
        wait_for_listener(place.address, place.port, deadline)
    left_s, owner = max(_LAST_TRY_S, deadline - time.monotonic()), "Rank 0" if place.hosted else "The launcher"
    return TcpRendezvousStore(join_store(place.address, place.port, left_s, owner=owner), owner), towards


def open_gloo(
    store: RendezvousStore,
    rank: int,
    size: int,
    *,
    host: str,
    interface: str = "",
    towards: str = "",
    secret: str = "",
    store_name: str = "",
) -> GlooTransport:
    """Open a transport of all ranks that have the same rendezvous store; collective.

    store: the rendezvous store.
    rank: this process's number.
    size: number of ranks.
    host: name of this host, for messages.
    interface: the network interface for Gloo between hosts; "" for the interface towards rank 0.
    towards: the address of this host that other hosts most likely reach.
    secret: of the job, in hex, the same on all ranks; "" if there is none yet.
    store_name: distinguishes the store from others of this process.
    Raises MissingDependencyError without torch, TransportError if the ranks do not find each other.
    """
    load_gloo()
    deadline = time.monotonic() + _START_S
    with _stores_explained(rank):
        rendezvous = find_peers(
            store,
            rank,
            size,
            name=f"rendezvous-{next(_rendezvous_numbers[store_name])}",
            host=host,
            interface=interface,
            towards=towards or address_towards(host),
            secret=secret,
            deadline=deadline,
        )
        with listen(rendezvous.address, size) as listener:
            place = f"{rendezvous.address} {listener.getsockname()[1]}"
            request_from_rank_0(rendezvous.store, rendezvous.store.set, f"peers/{rank}", place, deadline=deadline)
            told = [one.decode().split() for one in collect(rendezvous.store, "peers", size, deadline)]
            places = [(address, int(port)) for address, port in told]
            connections = connect_all(listener, rank, places, rendezvous.secret, deadline)
    peers = PeerConnections(rank, connections, rendezvous.hosts)
    return GlooTransport(rendezvous, peers, range(size), "world", NumpyArithmetic())


@contextlib.contextmanager
def _stores_explained(rank: int) -> Iterator[None]:
    """Raise TransportError instead of torch's error for a store whose process has ended."""
    try:
        yield
    except HvdkitError:
        raise
    except RuntimeError as error:
        raise TransportError(
            f"Rank {rank} cannot find the other ranks, because a store for it does not answer any more: {error}. If "
            "rank 0 or the launcher has ended, see its output for the cause."
        ) from error


class GlooTransport(BaseTransport):
    """Moves bytes with Gloo's collectives; adds dtypes itself that Gloo does not add, or rounds too often.

    rendezvous: the result of the rendezvous of all ranks.
    peers: connections to all ranks; closed with this transport if it is the transport of all ranks.
    ranks: the ranks of this group, by their numbers among `peers`.
    key: the group's name, which no other group has.
    arithmetic: adds and casts the numbers.
    algorithm: see BetweenHosts.
    """

    name = "gloo"
    backend = "gloo"
    checks_ranks = True

    def __init__(
        self,
        rendezvous: Rendezvous,
        peers: PeerConnections,
        ranks: Sequence[int],
        key: str,
        arithmetic: Arithmetic,
        algorithm: str = "auto",
    ) -> None:
        self.ranks = tuple(ranks)
        size = len(self.ranks)
        between = BetweenHosts(algorithm, ("library", "pieces"), size)
        super().__init__(self.ranks.index(peers.rank), size, arithmetic, between)
        self._rendezvous, self._peers, self._key = rendezvous, peers, key
        self._made = itertools.count()
        self._groups: Counter[tuple[int, ...]] = Counter()
        self._wire: GlooWire | None = None  # opened at the first collective, which all ranks call
        self._messages: PeerMessages | None = None
        self._closed = False

    def _assemble(self, key: str) -> None:
        """Wait until all ranks of the group call this. Gloo itself would wait for a dead rank without a check."""
        calls().begun += 1  # counts: a rank whose operation has failed before does not call it
        mailbox = PeerMailbox(self._peers, self.ranks, _channel(key))
        for rank in range(self.size):
            mailbox.send(rank, b"")
        here: set[int] = set()
        waiting = Backoff(self.check)
        while len(here) < self.size:
            here.update(rank for rank, _ in mailbox.receive())
            waiting.pause()
        mailbox.close()

    def _name(self) -> str:
        """Return a name for the next group or mailbox that all these ranks make together."""
        return f"{self._key}/{next(self._made)}"

    @property
    def wire(self) -> GlooWire:
        if self._wire is None:
            self._check_open()
            self._wire = self._connect(self._key)
        return self._wire

    def _check_open(self) -> None:
        if self._closed:
            raise closed_before("Gloo")

    def open_wire(self) -> GlooWire:
        return self._connect(self._name())

    def _connect(self, key: str) -> GlooWire:
        rendezvous = self._rendezvous
        self._assemble(key)
        wire = GlooWire(rendezvous.store, key, self.rank, self.size, rendezvous.address, self._explain)
        barrier = wire.barrier()  # a rank that closed its connections now would break those that others still make
        barrier.check = self.check
        barrier.wait()
        return wire

    def begin_message(self, buffer: Buffer, peer: int, tag: int, *, sends: bool) -> Request:
        if self._messages is None:
            self._check_open()
            self._messages = PeerMessages(PeerMailbox(self._peers, self.ranks, _channel(f"{self._key} messages")))
        begin = self._messages.send if sends else self._messages.receive
        return self._watched(MessageRequest(begin(buffer, peer, tag)))

    def split(self, groups: Groups) -> GlooTransport | None:
        """See Transport.split. It sends nothing: all ranks know the groups, and count them in the same way."""
        check_groups(groups, self.size)
        key, number = self._name(), find_group(groups, self.rank)
        if number is None:
            return None
        return self._group([self.ranks[rank] for rank in groups[number]], f"{key}.{number}")

    def _group(self, ranks: Sequence[int], key: str) -> GlooTransport:
        return GlooTransport(self._rendezvous, self._peers, ranks, key, self.arithmetic, self.between.algorithm)

    def create_group(self, ranks: Sequence[int]) -> GlooTransport:
        """See Transport.create_group. Each rank counts the groups of these ranks that it makes."""
        check_groups([ranks], self.size)
        members = tuple(self.ranks[rank] for rank in ranks)
        number = self._groups[members] = self._groups[members] + 1
        return self._group(members, f"{self._key}/{'.'.join(map(str, members))}.{number}")

    def find_nodes(self) -> list[int]:
        """See BaseTransport.find_nodes. Ranks share a host if its name and boot ID are equal."""
        return [self._rendezvous.nodes[rank] for rank in self.ranks]

    def open_mailbox(self) -> PeerMailbox:
        return PeerMailbox(self._peers, self.ranks, _channel(self._name()))

    def check(self) -> None:
        self._peers.check(self.ranks)

    def _explain(self, what: str, error: Exception) -> Exception:
        """Make the error of a failed call, with the rank that has ended; Gloo's own error names only its port."""
        deadline = time.monotonic() + _LOSS_REPORT_S
        while True:
            try:
                self._peers.check(self.ranks, at_once=True)
            except RankLostError as lost:
                return lost
            if time.monotonic() >= deadline:
                return TransportError(
                    f"Gloo's {what} failed: {error}. If another rank has ended, see its output for the cause. A rank "
                    "that is stopped (SIGSTOP) does not answer."
                )
            time.sleep(0.01)

    def leave(self) -> None:
        self._peers.leave()

    def close(self, *, idle: bool = True) -> None:
        if self._closed:
            return
        spans_all = self._key == "world"
        try:
            if spans_all and idle:
                with contextlib.suppress(RankLostError):  # a rank that ended its script without shutdown()
                    self.barrier()  # so that no rank takes an orderly end for a loss
        finally:
            self._closed = True
            if self._wire is not None:
                self._wire.close()
                self._wire = None
            if self._messages is not None:
                self._messages.close()
                self._messages = None
            if spans_all:
                self._peers.close()


def _channel(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
