"""Connect every rank with every other one, at addresses that they have told each other."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdkit.errors import TransportError
from hvdkit.handshake import ANSWER_BYTES, Challenge, connect
from hvdkit.transport.polling import look

PURPOSE = b"mesh"
_HANDSHAKE_S = 5.0  # whoever is not done in time comes again
_HANDSHAKES = 64  # at a time, or as many as there are ranks
_PAUSE_S = 0.05
_LOOK_S = 0.2  # between two calls of what watches this thread's waits

# A host that is gone without a word is noticed after half a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def listen(address: str, backlog: int) -> socket.socket:
    """A socket that listens on any port of this address."""
    return socket.create_server((address, 0), backlog=backlog)


def wait_for_listener(address: str, port: int, deadline: float) -> None:
    """Return when something listens there, or at the deadline, on the clock of time.monotonic()."""
    while time.monotonic() < deadline:
        look()
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_HANDSHAKE_S):
            return
        time.sleep(_PAUSE_S)


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
    handshakes = _Handshakes(listener, secret, rank, max(_HANDSHAKES, len(places)))
    try:
        while expected - set(connections):
            left = deadline - time.monotonic()
            if left <= 0:
                missing = ", ".join(map(str, sorted(expected - set(connections))))
                raise TransportError(
                    f"Rank {rank} timed out waiting for connections from rank(s) {missing}. See the output of these "
                    "ranks."
                )
            look()
            for peer, connection in handshakes.go_on(min(left, _LOOK_S)):
                if peer not in expected:
                    connection.close()
                    continue
                if peer in connections:
                    connections[peer].close()  # it did not hear the answer, and has come again
                connections[peer] = _tune(connection)
    finally:
        handshakes.close()
    return connections


class _Handshake(NamedTuple):
    """One that has connected and has not proven the secret yet. since: by time.monotonic()."""

    connection: socket.socket
    challenge: Challenge
    since: float
    answer: bytearray


class _Handshakes:
    """Handshakes beside each other, so that a stranger who says nothing keeps no rank waiting.

    most: at a time; the oldest is dropped for one more.
    """

    def __init__(self, listener: socket.socket, secret: bytes, rank: int, most: int) -> None:
        self._listener, self._secret, self._rank, self._most = listener, secret, rank, most
        self._open: dict[int, _Handshake] = {}  # by file descriptor, the oldest first
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        listener.settimeout(0)

    def go_on(self, wait_s: float) -> Iterator[tuple[int, socket.socket]]:
        """Wait for some bytes, at most so long; yield the ranks, with their connections, that are done by then."""
        wait_s = min(wait_s, _HANDSHAKE_S) if self._open else wait_s
        for number, _ in self._poll.poll(1000 * wait_s):
            if number == self._listener.fileno():
                self._accept()
            elif number in self._open:
                yield from self._read(self._open[number])
        for one in list(self._open.values()):
            if one.since < time.monotonic() - _HANDSHAKE_S:
                self._leave(one)

    def close(self) -> None:
        """Drop those that are not done."""
        for one in list(self._open.values()):
            self._leave(one)

    def _accept(self) -> None:
        if len(self._open) >= self._most:
            self._leave(next(iter(self._open.values())))
        try:
            connection, _ = self._listener.accept()
        except OSError:  # who came has gone again, or there is no room for another file
            time.sleep(_PAUSE_S)
            return
        connection.settimeout(0)
        challenge = Challenge(self._secret, PURPOSE, self._rank)
        self._open[connection.fileno()] = one = _Handshake(connection, challenge, time.monotonic(), bytearray())
        self._poll.register(connection, select.POLLIN)
        try:
            connection.send(challenge.nonce)
        except OSError:
            self._leave(one)

    def _read(self, one: _Handshake) -> Iterator[tuple[int, socket.socket]]:
        try:
            piece = one.connection.recv(ANSWER_BYTES - len(one.answer))
        except OSError:
            piece = b""
        one.answer.extend(piece)
        if piece and len(one.answer) < ANSWER_BYTES:
            return
        proven = one.challenge.check(bytes(one.answer)) if piece else None
        self._leave(one, keep=proven is not None)
        if proven is not None:
            try:
                one.connection.settimeout(_HANDSHAKE_S)
                one.connection.sendall(proven.proof)
            except OSError:
                one.connection.close()
                return
            yield proven.rank, one.connection

    def _leave(self, one: _Handshake, *, keep: bool = False) -> None:
        self._poll.unregister(one.connection)
        del self._open[one.connection.fileno()]
        if not keep:
            one.connection.close()


def _connect(place: tuple[str, int], secret: bytes, rank: int, peer: int, deadline: float) -> socket.socket:
    seen: object = "it did not answer"
    while time.monotonic() < deadline:
        look()
        try:
            connection = socket.create_connection(place, timeout=_HANDSHAKE_S)
        except OSError as error:
            seen = error
            time.sleep(_PAUSE_S)
            continue
        try:
            _wait_for_bytes(connection, deadline)
            connection.settimeout(max(_HANDSHAKE_S, deadline - time.monotonic()))
            connect(connection, secret, PURPOSE, rank, peer)
            return _tune(connection)
        except OSError as error:
            seen = error
            connection.close()
        except BaseException:  # of what watches this wait, or Ctrl-C: nobody else closes it
            connection.close()
            raise
        time.sleep(_PAUSE_S)
    raise TransportError(
        f"Rank {rank} cannot connect to rank {peer} at {place[0]}:{place[1]}: {seen}. If rank {peer} is stopped "
        "(SIGSTOP), look at its process. If a firewall blocks this network between the hosts, set GLOO_SOCKET_IFNAME "
        "to another interface."
    )


def _wait_for_bytes(connection: socket.socket, deadline: float) -> None:
    """Return when the other side has said something: a process that is stopped is connected to, and says nothing."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(1000 * _LOOK_S):
        look()
        if time.monotonic() >= deadline:
            raise TimeoutError("it has taken the connection, and says nothing")


def _tune(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
