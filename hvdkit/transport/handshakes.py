"""Handshakes with the processes that connect to a listening socket; one thread waits for all of them."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from hvdkit.handshake import ANSWER_BYTES, Challenge, Proven
from hvdkit.unproven import HANDSHAKE_S, Unproven

HANDSHAKES = 64  # limit of handshakes at the same time
_PAUSE_S = 0.05


@dataclass(eq=False)
class _Handshake:
    """A connection that has not proven the secret yet."""

    connection: socket.socket
    challenge: Challenge
    answer: bytearray = field(default_factory=bytearray)


class Handshakes:
    """Does handshakes concurrently, so that a client that sends nothing, or too slowly, does not block the others.

    listener: the listening socket.
    secret: see hvdkit.handshake.Challenge.
    purpose: see hvdkit.handshake.Challenge.
    rank: see hvdkit.handshake.Challenge.
    most: limit of handshakes at the same time; beyond it, a new connection drops one, see hvdkit.unproven.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, purpose: bytes, rank: int = 0, *, most: int = HANDSHAKES
    ) -> None:
        self._listener, self._secret, self._purpose, self._rank = listener, secret, purpose, rank
        self._open: dict[int, _Handshake] = {}  # by file descriptor
        self._unproven: Unproven[_Handshake] = Unproven(most)  # the same
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        listener.settimeout(0)

    def go_on(self, wait_s: float) -> Iterator[tuple[Proven, socket.socket]]:
        """Wait for bytes, at most `wait_s` seconds; yield the completed handshakes with their connections."""
        wait_s = min(wait_s, HANDSHAKE_S) if self._open else wait_s
        for number, _ in self._poll.poll(1000 * wait_s):
            if number == self._listener.fileno():
                self._accept()
            elif number in self._open:
                yield from self._read(self._open[number])
        for one in list(self._unproven):
            if self._unproven.since(one) < time.monotonic() - HANDSHAKE_S:
                self._leave(one)

    def close(self) -> None:
        """Close the connections whose handshakes are not done."""
        for one in list(self._open.values()):
            self._leave(one)

    def _accept(self) -> None:
        if self._unproven.full:
            self._leave(*self._unproven.choose())
        try:
            connection, address = self._listener.accept()
        except OSError:  # the client has disconnected, or the process has too many open files
            time.sleep(_PAUSE_S)
            return
        connection.settimeout(0)
        challenge = Challenge(self._secret, self._purpose, self._rank)
        self._open[connection.fileno()] = one = _Handshake(connection, challenge)
        self._unproven.add(one, address, time.monotonic())
        self._poll.register(connection, select.POLLIN)
        try:
            connection.send(challenge.nonce)
        except OSError:
            self._leave(one)

    def _read(self, one: _Handshake) -> Iterator[tuple[Proven, socket.socket]]:
        try:
            piece = one.connection.recv(ANSWER_BYTES - len(one.answer))
        except BlockingIOError:  # the event was for an earlier connection with this descriptor
            return
        except OSError:
            piece = b""
        one.answer.extend(piece)
        if piece and len(one.answer) < ANSWER_BYTES:
            return
        proven = one.challenge.check(bytes(one.answer)) if piece else None
        self._leave(one, keep=proven is not None)
        if proven is not None:
            try:
                one.connection.settimeout(HANDSHAKE_S)
                one.connection.sendall(proven.proof)
            except OSError:
                one.connection.close()
                return
            yield proven, one.connection

    def _leave(self, one: _Handshake, *, keep: bool = False) -> None:
        self._poll.unregister(one.connection)
        del self._open[one.connection.fileno()]
        self._unproven.remove(one)
        if not keep:
            one.connection.close()
