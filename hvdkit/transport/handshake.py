"""How two ranks that connect make sure of each other: both know the job's secret, and neither sends it."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

_NONCE = 16
_MAC = 32
_RANK = struct.Struct("<I")


def greet(connection: socket.socket, secret: bytes, rank: int, peer: int) -> bool:
    """Of the rank that connects: say who this is, and hear whether that is `peer`. Raises OSError."""
    theirs = _receive(connection, _NONCE)
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(_RANK.pack(rank) + ours + _sign(secret, b"connects", theirs, ours, rank, peer))
    return hmac.compare_digest(_receive(connection, _MAC), _sign(secret, b"accepts", theirs, ours, rank, peer))


def hear(connection: socket.socket, secret: bytes, rank: int) -> int | None:
    """Of the rank that is connected to: who it is, None for a stranger. Raises OSError."""
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(ours)
    (peer,) = _RANK.unpack(_receive(connection, _RANK.size))
    theirs = _receive(connection, _NONCE)
    shown = _receive(connection, _MAC)
    if not hmac.compare_digest(shown, _sign(secret, b"connects", ours, theirs, peer, rank)):
        return None
    connection.sendall(_sign(secret, b"accepts", ours, theirs, peer, rank))
    return int(peer)


def _sign(secret: bytes, what: bytes, accepting: bytes, connecting: bytes, rank: int, peer: int) -> bytes:
    return hmac.digest(secret, what + accepting + connecting + _RANK.pack(rank) + _RANK.pack(peer), "sha256")


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        data += piece
    return data
