"""The connection between agents and hvdrun: frames, and the handshake that TCP needs."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct

HEADER = struct.Struct(">cI")  # type, length of the payload
HELLO, START, STDOUT, STDERR, PAUSE, END = b"H", b"S", b"O", b"E", b"Z", b"X"  # from an agent
DOING = b"D"  # from an agent: what its rank is doing
NEWS = b"N"  # from an agent: how far its rank is, of a world that may change; from hvdrun, for the rank: of others
PULSE = b"P"  # from an agent, on a second connection, as the only frame there
GO, STOP, BYE, SIGNAL, WINDOW, ASK = b"G", b"T", b"B", b"K", b"W", b"A"  # from hvdrun
SAVE = b"V"  # from hvdrun: have the rank save and end, if it knows how to
ENDED_BY_HVDRUN = "hvdrun ended the job"  # why a rank was ended, in an END
NONCE_BYTES = 32
CONTROL, INQUIRY = "control", "inquiry"  # Unix sockets in the job's folder: for agents, for `hvdkit stacks`
CONNECT_S = 10.0
_LOOK_S = 2.0
# A host that answers nothing for this long is lost: 3 s of quiet, then 5 questions 1 s apart.
_QUIET_S, _ASK_S, _QUESTIONS = 3, 1, 5


class Gone(Exception):
    """hvdrun is not there any more."""


class NotHvdrun(OSError):
    """Something else listens where hvdrun did."""


class Control:
    """The connection to hvdrun.

    address: this host's, as hvdrun sees it; "" on one host.
    pulse: a second connection over which nothing is sent, so that the system can ask whether the other side's host is
    there. On the first it does not ask while output waits there, because nobody reads it or because the host is gone.
    """

    def __init__(self, connection: socket.socket, path: str = "", pulse: socket.socket | None = None) -> None:
        self.socket, self.pulse, self._path = connection, pulse, path
        self.address = str(connection.getsockname()[0]) if pulse is not None else ""
        self._received = b""

    @property
    def sources(self) -> list[int]:
        """The descriptors on which `receive` may have news."""
        return [self.socket.fileno(), *([self.pulse.fileno()] if self.pulse is not None else [])]

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send one frame; raises Gone if hvdrun is not there."""
        view = memoryview(HEADER.pack(kind, len(payload)) + payload)
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        if self.pulse is not None:
            poll.register(self.pulse, select.POLLIN)
        while view:
            self._check(dict(poll.poll()))
            view = view[self._send_some(view) :]

    def clean_up(self) -> None:
        """Remove the job's folder with its sockets, which a killed hvdrun could not."""
        if self._path:
            folder = os.path.dirname(self._path)
            for path in (self._path, os.path.join(folder, INQUIRY)):
                with contextlib.suppress(OSError):  # another agent was first
                    os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Wait for some bytes and return the frames that are complete; raises Gone if hvdrun is not there."""
        poll = select.poll()
        for source in self.sources:
            poll.register(source, select.POLLIN)
        self._check(dict(poll.poll()))
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

    def _send_some(self, view: memoryview) -> int:
        try:
            return self.socket.send(view, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            raise Gone from None

    def _check(self, ready: dict[int, int]) -> None:
        # Nothing is ever sent over the pulse: what happens there is its end.
        if self.pulse is not None and self.pulse.fileno() in ready and self.socket.fileno() not in ready:
            raise Gone


def sign(secret: str, who: bytes, first: bytes, second: bytes) -> bytes:
    """Prove that one knows the job's secret, in answer to the other side's nonce."""
    import hmac  # costs milliseconds, and jobs on one host need it not

    return hmac.digest(secret.encode(), who + first + second, "sha256")


def open_control(place: str, secret: str, rank: int) -> Control:
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
    problems = []
    for address in addresses.split(","):
        answer = _try_address(address, int(port), secret, str(rank).encode())
        if isinstance(answer, Control):
            return answer
        problems.append(answer)
    raise Gone("; ".join(problems))


def look_for_hvdrun(place: str, secret: str) -> bool | None:
    """Is hvdrun there? None if that cannot be known, as nothing answers. place: as for open_control, of a network."""
    port, _, addresses = place.partition(":")[2].partition(":")
    found = [_is_hvdrun_at(address, int(port), secret) for address in addresses.split(",")]
    return next((answer for answer in (True, False) if answer in found), None)


def _is_hvdrun_at(address: str, port: int, secret: str) -> bool | None:
    try:
        _connect(address, port, secret, _LOOK_S).close()
    except (ConnectionRefusedError, NotHvdrun):
        return False
    except OSError:
        return None
    return True


def _try_address(address: str, port: int, secret: str, rank: bytes) -> Control | str:
    try:
        connection, pulse = (_connect(address, port, secret) for _ in range(2))
        pulse.sendall(HEADER.pack(PULSE, len(rank)) + rank)
    except OSError as error:
        return f"{address} port {port}: {error}"
    return Control(connection, pulse=pulse)


def _connect(address: str, port: int, secret: str, timeout_s: float = CONNECT_S) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=timeout_s)
    _shake_hands(connection, secret)
    connection.settimeout(None)
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Have a quiet TCP connection fail within ten seconds when the other host falls silent, not after hours."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _QUIET_S), ("TCP_KEEPINTVL", _ASK_S), ("TCP_KEEPCNT", _QUESTIONS)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shake_hands(connection: socket.socket, secret: str) -> None:
    theirs = _receive_exactly(connection, NONCE_BYTES)
    mine = os.urandom(NONCE_BYTES)
    connection.sendall(mine + sign(secret, b"agent", theirs, mine))
    if _receive_exactly(connection, NONCE_BYTES) != sign(secret, b"hvdrun", mine, theirs):
        raise NotHvdrun("what answers there is not this job's hvdrun")


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise OSError("the connection was closed")
        data += more
    return data
