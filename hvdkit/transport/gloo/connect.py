"""Connects every rank with every other rank, at the addresses that the ranks have exchanged."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Sequence

from hvdkit.errors import TransportError
from hvdkit.handshake import connect
from hvdkit.transport.handshakes import HANDSHAKES, Handshakes
from hvdkit.transport.polling import check_wait
from hvdkit.unproven import HANDSHAKE_S

PURPOSE = b"mesh"
_PAUSE_S = 0.05
_LOOK_S = 0.2  # interval between two calls of look()

# The loss of a host that closes no connection is noticed after half a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def listen(address: str, backlog: int) -> socket.socket:
    """Open a socket that listens on a free port of this address."""
    return socket.create_server((address, 0), backlog=backlog)


def wait_for_listener(address: str, port: int, deadline: float) -> None:
    """Wait until a process listens at the address, or until the deadline, on the clock of time.monotonic()."""
    while time.monotonic() < deadline:
        check_wait()
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=HANDSHAKE_S):
            return
        time.sleep(_PAUSE_S)


def connect_all(
    listener: socket.socket, rank: int, places: Sequence[tuple[str, int]], secret: bytes, deadline: float
) -> dict[int, socket.socket]:
    """Connect to each other rank; collective. This rank connects to lower ranks, and accepts from higher ranks.

    listener: this rank's listening socket.
    rank: this rank.
    places: address and port of every rank's listener, by rank.
    secret: the secret of the job, which the connections prove.
    deadline: on the clock of time.monotonic().
    Returns the connections by rank. Raises TransportError that names the ranks missing at the deadline.
    """
    connections: dict[int, socket.socket] = {}
    for peer in range(rank):
        connections[peer] = _connect(places[peer], secret, rank, peer, deadline)
    expected = set(range(rank + 1, len(places)))
    handshakes = Handshakes(listener, secret, PURPOSE, rank, most=max(HANDSHAKES, len(places)))
    try:
        while expected - set(connections):
            left = deadline - time.monotonic()
            if left <= 0:
                missing = ", ".join(map(str, sorted(expected - set(connections))))
                raise TransportError(
                    f"Rank {rank} timed out waiting for connections from rank(s) {missing}. See the output of these "
                    "ranks."
                )
            check_wait()
            for proven, connection in handshakes.go_on(min(left, _LOOK_S)):
                peer = proven.rank
                if peer not in expected:
                    connection.close()
                    continue
                if peer in connections:
                    connections[peer].close()  # the rank did not get the answer, and has connected again
                connections[peer] = _tune(connection)
    finally:
        handshakes.close()
    return connections


def _connect(place: tuple[str, int], secret: bytes, rank: int, peer: int, deadline: float) -> socket.socket:
    seen: object = "it did not answer"
    while time.monotonic() < deadline:
        check_wait()
        try:
            connection = socket.create_connection(place, timeout=HANDSHAKE_S)
        except OSError as error:
            seen = error
            time.sleep(_PAUSE_S)
            continue
        try:
            _wait_for_bytes(connection, deadline)
            connection.settimeout(max(HANDSHAKE_S, deadline - time.monotonic()))
            connect(connection, secret, PURPOSE, rank, peer)
            return _tune(connection)
        except OSError as error:
            seen = error
            connection.close()
        except BaseException:  # from look(), or Ctrl-C: only this function can close the connection
            connection.close()
            raise
        time.sleep(_PAUSE_S)
    raise TransportError(
        f"Rank {rank} cannot connect to rank {peer} at {place[0]}:{place[1]}: {seen}. If rank {peer} is stopped "
        "(SIGSTOP), look at its process. If a firewall blocks this network between the hosts, set GLOO_SOCKET_IFNAME "
        "to another interface."
    )


def _wait_for_bytes(connection: socket.socket, deadline: float) -> None:
    """Wait until the other side has sent bytes: the kernel accepts connections even for a stopped process."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(1000 * _LOOK_S):
        check_wait()
        if time.monotonic() >= deadline:
            raise TimeoutError("it has taken the connection, and says nothing")


def _tune(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
