"""Which connections of a server have not proven its secret yet, and which of them is dropped for the next one.

The servers do the input and output: hvdkit.launch.state.accept_loop with asyncio, hvdkit.transport.handshakes in a
thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

HANDSHAKE_S = 5.0  # limit of a whole handshake; a process that is slower connects again

Connection = TypeVar("Connection")


class Unproven(Generic[Connection]):
    """The unproven connections, the oldest first.

    The next one to drop is the oldest of the peer with the most connections. So a host that opens many drops its own,
    and those of other hosts stay.

    most: limit of connections at the same time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._peers: dict[Connection, str] = {}
        self._since: dict[str, dict[Connection, float]] = {}  # time of acceptance, by peer and connection

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, connection: object) -> bool:
        return connection in self._peers

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._peers)

    @property
    def full(self) -> bool:
        """Must a connection be dropped for the next one?"""
        return len(self._peers) >= self.most

    def add(self, connection: Connection, address: object, now: float) -> None:
        """Add a connection. address: of its peer, as accept() returns it. now: the time, on a clock of the caller."""
        peer = self._peers[connection] = str(address[0]) if isinstance(address, tuple) else ""
        self._since.setdefault(peer, {})[connection] = now

    def remove(self, connection: Connection) -> bool:
        """Remove a connection that has proven the secret or is closed; returns whether it was unproven."""
        peer = self._peers.pop(connection, None)
        if peer is None:
            return False
        del self._since[peer][connection]
        if not self._since[peer]:
            del self._since[peer]
        return True

    def since(self, connection: Connection) -> float:
        """Return the time of a connection's acceptance."""
        return self._since[self._peers[connection]][connection]

    def choose(self, count: int = 1) -> list[Connection]:
        """Choose connections to drop, each as if those before it were dropped; fewer if there are fewer."""
        heap = []
        for peer, each in self._since.items():
            rest = iter(each.items())
            connection, since = next(rest)
            heap.append((-len(each), since, peer, connection, rest))
        heapq.heapify(heap)
        chosen: list[Connection] = []
        while heap and len(chosen) < count:
            size, _, peer, connection, rest = heap[0]
            chosen.append(connection)
            following = next(rest, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (size + 1, following[1], peer, following[0], rest))
        return chosen
