"""The handshake by which two processes of a job prove that they know its secret, and the frames that follow it.

A accepts and C connects; the nonces N are 32 random bytes. MAC is HMAC-SHA256 (RFC 2104), the exchange is the mutual
authentication in three passes of ISO/IEC 9798-4:

    A -> C   N_A
    C -> A   rank of C, N_C, MAC(secret, purpose, "connects", N_A, N_C, rank of C, rank of A)
    A -> C   MAC(secret, purpose, "accepts", the same)
    key of the session = MAC(secret, purpose, "session", the same)

A frame is a header (type, length of the payload), a code, the payload and a code. Each code is the MAC, under the key
of the session, of the direction, the frame's number and all bytes of the frame so far. So a frame that was changed,
repeated, moved, left out or made by another process ends the connection; a length is trusted only after its own code.
Nothing is encrypted.

Rank agents use this file too: it uses only the standard library, and its imports add to the start-up time of agents.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import struct
import sys
import time
from _operator import _compare_digest as compare_digest  # hmac's own, without loading OpenSSL
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

NONCE_BYTES = 32
MAC_BYTES = 32
LARGEST_PAYLOAD = 64 << 20
_RANK = struct.Struct(">I")
_HEADER = struct.Struct(">cI")
_NUMBER = struct.Struct(">cQ")
_SHA256_BLOCK_BYTES = 64
ANSWER_BYTES = _RANK.size + NONCE_BYTES + MAC_BYTES
_TRIES, _PAUSE_S = 3, 0.3


class AuthenticationError(ConnectionError):
    """The other side does not know the secret, or the bytes received are not those that the other side sent."""


class StrangerError(AuthenticationError):
    """The process that answered does not know the secret."""


def _load_sha256() -> Callable[..., Any]:
    """Return Python's own SHA-256 unless OpenSSL is loaded already: loading it takes 10 ms of an agent's start."""
    own = "_sha2" if sys.version_info >= (3, 12) else "_sha256"
    with contextlib.suppress(ImportError):  # Python may be built without this module
        return importlib.import_module("hashlib" if "_hashlib" in sys.modules else own).sha256  # type: ignore[no-any-return]
    return importlib.import_module("hashlib").sha256  # type: ignore[no-any-return]


_sha256 = _load_sha256()


class Mac:
    """HMAC-SHA256 with one key (RFC 2104)."""

    def __init__(self, key: bytes) -> None:
        if len(key) > _SHA256_BLOCK_BYTES:
            key = _sha256(key).digest()
        block = key.ljust(_SHA256_BLOCK_BYTES, b"\0")
        self._inner = _sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = _sha256(bytes(byte ^ 0x5C for byte in block))

    def sign(self, *parts: bytes) -> bytes:
        """Compute the code of the concatenated parts."""
        inner, outer = self._inner.copy(), self._outer.copy()
        for part in parts:
            inner.update(part)
        outer.update(inner.digest())
        return bytes(outer.digest())

    def check(self, code: bytes, *parts: bytes) -> bool:
        """Return whether `code` is the code of the parts, in a time that does not depend on which bytes differ."""
        return compare_digest(code, self.sign(*parts))


class Session:
    """Seals the frames that one connection sends after its handshake, and checks the frames that it receives.

    accepted: True on the side that accepted the connection.
    """

    def __init__(self, key: bytes, *, accepted: bool) -> None:
        self._mac = Mac(key)
        self._sends, self._receives = (b"A", b"C") if accepted else (b"C", b"A")
        self._sent = self._received = 0
        self._data = bytearray()
        self._header: tuple[bytes, int] | None = None

    def seal(self, kind: bytes, payload: bytes = b"") -> bytes:
        """Build the next frame to send. kind: one byte, the type. payload: at most LARGEST_PAYLOAD bytes."""
        number, header = _NUMBER.pack(self._sends, self._sent), _HEADER.pack(kind, len(payload))
        self._sent += 1
        return b"".join(
            (header, self._mac.sign(number, header), payload, self._mac.sign(number, header, b"payload", payload))
        )

    def receive(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Add received bytes, and yield the frames (type, payload) that are complete.

        data: any number of bytes. Raises AuthenticationError if the bytes are not the next frame that the other side
        sent; the caller must then close the connection.
        """
        self._data += data
        while True:
            number = _NUMBER.pack(self._receives, self._received)
            if self._header is None:
                if len(self._data) < _HEADER.size + MAC_BYTES:
                    return
                header, code = self._take(_HEADER.size), self._take(MAC_BYTES)
                self._check(code, number, header)
                self._header = _HEADER.unpack(header)
                if self._header[1] > LARGEST_PAYLOAD:
                    raise AuthenticationError(
                        f"frame {self._received} has {self._header[1]} bytes; the limit is {LARGEST_PAYLOAD}"
                    )
            kind, length = self._header
            if len(self._data) < length + MAC_BYTES:
                return
            payload, code = self._take(length), self._take(MAC_BYTES)
            self._check(code, number, _HEADER.pack(kind, length), b"payload", payload)
            self._header = None
            self._received += 1
            yield kind, payload

    def _take(self, count: int) -> bytes:
        piece = bytes(self._data[:count])
        del self._data[:count]
        return piece

    def _check(self, code: bytes, *parts: bytes) -> None:
        if not self._mac.check(code, *parts):
            raise AuthenticationError(
                f"frame {self._received} on the connection has no valid code of the job's secret: it was changed, "
                "repeated, left out or forged"
            )


class Proven(NamedTuple):
    """A peer that has proven the secret. rank: as the peer states it. proof: bytes to send back before any frame."""

    rank: int
    proof: bytes
    session: Session


class Challenge:
    """The accepting side of a handshake, which does no input or output itself.

    The caller sends `nonce`, reads ANSWER_BYTES bytes and passes them to `check`.
    purpose: the purpose of the connection, the same on both sides.
    rank: the rank of this side; 0 if it has none.
    """

    def __init__(self, secret: bytes, purpose: bytes, rank: int = 0) -> None:
        self._secret, self._purpose, self._rank = secret, purpose, rank
        self.nonce = os.urandom(NONCE_BYTES)

    def check(self, answer: bytes) -> Proven | None:
        """Check the answer, ANSWER_BYTES long; None if the peer does not know the secret."""
        (rank,) = _RANK.unpack(answer[: _RANK.size])
        theirs, code = answer[_RANK.size : -MAC_BYTES], answer[-MAC_BYTES:]
        parts = _list_parts(self.nonce, theirs, rank, self._rank)
        mac = Mac(self._secret)
        if not mac.check(code, self._purpose, b"\0connects", *parts):
            return None
        key = mac.sign(self._purpose, b"\0session", *parts)
        return Proven(rank, mac.sign(self._purpose, b"\0accepts", *parts), Session(key, accepted=True))


def connect(connection: socket.socket, secret: bytes, purpose: bytes, rank: int = 0, peer: int = 0) -> Session:
    """Do the handshake on a blocking connection that this side has opened.

    connection: a connected socket, which keeps its own time limit.
    secret: the job's secret.
    purpose: the purpose of the connection, the same on both sides.
    rank: the rank of this side.
    peer: the rank of the other side.
    Raises StrangerError if the other side does not know the secret, OSError if it closes the connection or sends
    nothing within the time limit.
    """
    theirs, ours = receive_exactly(connection, NONCE_BYTES), os.urandom(NONCE_BYTES)
    parts = _list_parts(theirs, ours, rank, peer)
    mac = Mac(secret)
    connection.sendall(_RANK.pack(rank) + ours + mac.sign(purpose, b"\0connects", *parts))
    if not mac.check(receive_exactly(connection, MAC_BYTES), purpose, b"\0accepts", *parts):
        raise StrangerError("the process that answered does not know the job's secret")
    return Session(mac.sign(purpose, b"\0session", *parts), accepted=False)


def open_connection(
    address: str, port: int, secret: bytes, purpose: bytes, rank: int = 0, *, timeout_s: float, tries: int = _TRIES
) -> tuple[socket.socket, Session]:
    """Connect over TCP and do the handshake; the returned socket is blocking, without a time limit.

    address: host name or IP address.
    port: TCP port.
    secret: the job's secret.
    purpose: the purpose of the connection, the same on both sides.
    rank: the rank of this side.
    timeout_s: limit of each step, in seconds.
    tries: number of attempts; the accepting side drops a slow connection while others wait, so it is tried again.
    Raises OSError, of which StrangerError is a subclass.
    """
    for left in reversed(range(tries)):
        connection = socket.create_connection((address, port), timeout=timeout_s)
        try:
            session = connect(connection, secret, purpose, rank)
            connection.settimeout(None)
        except OSError as error:
            connection.close()
            if isinstance(error, StrangerError) or not left:
                raise
            time.sleep(_PAUSE_S * (1 + os.urandom(1)[0] / 255))
        else:
            return connection, session
    raise ValueError(f"{tries} tries")


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes. Raises OSError if the other side closes the connection before."""
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        data += piece
    return data


def _list_parts(accepting: bytes, connecting: bytes, rank: int, peer: int) -> tuple[bytes, ...]:
    return accepting, connecting, _RANK.pack(rank), _RANK.pack(peer)
