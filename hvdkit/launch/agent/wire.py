"""The connection between agents and hvdrun: frames, and the handshake that TCP needs."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

HEADER = struct.Struct(">cI")  # type, length of the payload
HELLO, START, STDOUT, STDERR, END = b"H", b"S", b"O", b"E", b"X"  # from an agent
GO, STOP, BYE, SIGNAL, WINDOW = b"G", b"T", b"B", b"K", b"W"  # from hvdrun
NONCE_BYTES = 32
CONNECT_S = 10.0


class Gone(Exception):
    """hvdrun is not there any more."""


class Control:
    """The connection to hvdrun."""

    def __init__(self, connection: socket.socket, path: str = "") -> None:
        self.socket, self._path = connection, path
        self._received = b""

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send one frame; raises Gone if hvdrun is not there."""
        try:
            self.socket.sendall(HEADER.pack(kind, len(payload)) + payload)
        except OSError:
            raise Gone from None

    def clean_up(self) -> None:
        """Remove the Unix socket and its folder, which a killed hvdrun could not."""
        if self._path:
            with contextlib.suppress(OSError):  # another agent was first
                os.unlink(self._path)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self._path))

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Wait for some bytes and return the frames that are complete; raises Gone if hvdrun is not there."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise Gone
        self._received += data
        frames = []
        while len(self._received) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._received)
            if len(self._received) < HEADER.size + length:
                break
            frames.append((kind, self._received[HEADER.size : HEADER.size + length]))
            self._received = self._received[HEADER.size + length :]
        return frames


def sign(secret: str, who: bytes, first: bytes, second: bytes) -> bytes:
    """Prove that one knows the job's secret, in answer to the other side's nonce."""
    import hmac  # costs milliseconds, and jobs on one host need it not

    return hmac.digest(secret.encode(), who + first + second, "sha256")


def open_control(place: str, secret: str) -> Control:
    """Connect to hvdrun.

    place: "unix:PATH", or "tcp:PORT:ADDRESS,ADDRESS,..." of which the first that answers rightly is taken.
    Raises Gone saying what was tried.
    """
    family, _, rest = place.partition(":")
    if family == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(rest)
        except OSError as error:
            raise Gone(f"{rest}: {error.strerror}") from None
        return Control(connection, rest)
    port, _, addresses = rest.partition(":")
    answers = (_try_address(address, int(port), secret) for address in addresses.split(","))
    problems = []
    for answer in answers:
        if isinstance(answer, Control):
            return answer
        problems.append(answer)
    raise Gone("; ".join(problems))


def _try_address(address: str, port: int, secret: str) -> Control | str:
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_S)
        _shake_hands(connection, secret)
        connection.settimeout(None)
        keep_alive(connection)
    except OSError as error:
        return f"{address} port {port}: {error}"
    return Control(connection)


def keep_alive(connection: socket.socket) -> None:
    """Have a TCP connection fail within half a minute when the other host falls silent; by itself it takes hours."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shake_hands(connection: socket.socket, secret: str) -> None:
    theirs = _receive_exactly(connection, NONCE_BYTES)
    mine = os.urandom(NONCE_BYTES)
    connection.sendall(mine + sign(secret, b"agent", theirs, mine))
    if _receive_exactly(connection, NONCE_BYTES) != sign(secret, b"hvdrun", mine, theirs):
        raise OSError("what answers there is not this job's hvdrun")


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise OSError("the connection was closed")
        data += more
    return data
