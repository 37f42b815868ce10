"""Connect every rank with every other one, at addresses that they have told each other."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from hvdkit.errors import TransportError
from hvdkit.transport.handshake import greet, hear

_GREETING_S = 5.0  # for one greeting; whoever was not heard in time comes again
_PAUSE_S = 0.05

# A host that is gone without a word is noticed after half a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def listen(address: str, backlog: int) -> socket.socket:
    """A socket that listens on any port of this address."""
    return socket.create_server((address, 0), backlog=backlog)


def connect_all(
    listener: socket.socket, rank: int, places: Sequence[tuple[str, int]], secret: bytes, deadline: float
) -> dict[int, socket.socket]:
    """A connection to each other rank; all ranks call it. This rank connects to those below it, and hears those above.

    places: address and port of every rank's listener. deadline: on the clock of time.monotonic().
    Raises TransportError naming the ranks that are missing then.
    """
    connections: dict[int, socket.socket] = {}
    for peer in range(rank):
        connections[peer] = _connect(places[peer], secret, rank, peer, deadline)
    expected = set(range(rank + 1, len(places)))
    while expected - set(connections):
        left = deadline - time.monotonic()
        if left <= 0:
            missing = ", ".join(map(str, sorted(expected - set(connections))))
            raise TransportError(f"Rank {rank} waited for connections from rank(s) {missing}, and none came in time.")
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        who = _hear(connection, secret, rank)
        if who not in expected:
            connection.close()
            continue
        if who in connections:
            connections[who].close()  # it did not hear the answer, and has come again
        connections[who] = _tune(connection)
    return connections


def _hear(connection: socket.socket, secret: bytes, rank: int) -> int:
    """The rank that connected, -1 for a stranger."""
    connection.settimeout(_GREETING_S)
    try:
        peer = hear(connection, secret, rank)
    except OSError:
        return -1
    return -1 if peer is None else peer


def _connect(place: tuple[str, int], secret: bytes, rank: int, peer: int, deadline: float) -> socket.socket:
    seen: object = "not it that answered"
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection(place, timeout=_GREETING_S)
        except OSError as error:
            seen = error
            time.sleep(_PAUSE_S)
            continue
        try:
            connection.settimeout(max(_GREETING_S, deadline - time.monotonic()))
            if greet(connection, secret, rank, peer):
                return _tune(connection)
        except OSError as error:
            seen = error
        connection.close()
        time.sleep(_PAUSE_S)
    raise TransportError(
        f"Rank {rank} cannot connect to rank {peer} at {place[0]}:{place[1]}: {seen}. If a firewall stands between the "
        f"hosts, name another interface with GLOO_SOCKET_IFNAME."
    )


def _tune(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
