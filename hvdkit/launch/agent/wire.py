"""The connection between agents and hvdrun: the types of its frames; how they are sealed is in hvdkit.handshake."""

from __future__ import annotations

import contextlib
import os
import select
import socket

from hvdkit.handshake import AuthenticationError, Session, StrangerError, connect, open_connection

PURPOSE = b"hvdrun"  # of the handshake
HELLO, START, STDOUT, STDERR, PAUSE, END = b"H", b"S", b"O", b"E", b"Z", b"X"  # from an agent
DOING = b"D"  # from an agent: what its rank is doing
NEWS = b"N"  # from an agent: how far its rank is, of a world that may change; from hvdrun, for the rank: of others
PULSE = b"P"  # from an agent, on a second connection, as the only frame there
GO, STOP, BYE, SIGNAL, WINDOW, ASK = b"G", b"T", b"B", b"K", b"W", b"A"  # from hvdrun
SAVE = b"V"  # from hvdrun: have the rank save and end, if it knows how to
ENDED_BY_HVDRUN = "hvdrun ended the job"  # why a rank was ended, in an END
# In the job's folder: Unix sockets for agents and for `hvdkit stacks`; the job's secret, if all ranks are on one host.
CONTROL, INQUIRY, SECRET = "control", "inquiry", "secret"
CONNECT_S = 10.0
_LOOK_S = 2.0
# A host that answers nothing for this long is lost: 3 s of quiet, then 5 questions 1 s apart.
_QUIET_S, _ASK_S, _QUESTIONS = 3, 1, 5


class Gone(Exception):
    """hvdrun is not there any more."""


class Control:
    """The connection to hvdrun.

    address: this host's, as hvdrun sees it; "" on one host.
    pulse: a second connection over which nothing is sent, so that the system can ask whether the other side's host is
    there. On the first it does not ask while output waits there, because nobody reads it or because the host is gone.
    """

    def __init__(
        self, connection: socket.socket, session: Session, path: str = "", pulse: socket.socket | None = None
    ) -> None:
        self.socket, self.pulse, self._session, self._path = connection, pulse, session, path
        self.address = str(connection.getsockname()[0]) if pulse is not None else ""

    @property
    def sources(self) -> list[int]:
        """The descriptors on which `receive` may have news."""
        return [self.socket.fileno(), *([self.pulse.fileno()] if self.pulse is not None else [])]

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send one frame; raises Gone if hvdrun is not there."""
        view = memoryview(self._session.seal(kind, payload))
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
            for path in (self._path, os.path.join(folder, INQUIRY), os.path.join(folder, SECRET)):
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
        try:
            return list(self._session.receive(data))
        except AuthenticationError as error:
            raise Gone(f"{error}. Somebody between this host and hvdrun's may be reading and writing there") from None

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


def open_control(place: str, secret: str, rank: int) -> Control:
    """Connect to hvdrun.

    place: "unix:PATH", with the secret in a file beside it; or "tcp:PORT:ADDRESS,ADDRESS,..." of which the first that
    answers rightly is taken. secret: of the job, for TCP. Raises Gone saying what was tried.
    """
    family, _, rest = place.partition(":")
    if family == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with open(os.path.join(os.path.dirname(rest), SECRET), "rb") as file:
                of_job = file.read()
            connection.connect(rest)
            return Control(connection, connect(connection, of_job, PURPOSE, rank), rest)
        except OSError as error:
            raise Gone(f"{rest}: {error}") from None
    port, _, addresses = rest.partition(":")
    problems = []
    for address in addresses.split(","):
        answer = _try_address(address, int(port), secret, rank)
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
        open_connection(address, port, secret.encode(), PURPOSE, timeout_s=_LOOK_S, tries=1)[0].close()
    except (ConnectionRefusedError, StrangerError):
        return False
    except OSError:
        return None
    return True


def _try_address(address: str, port: int, secret: str, rank: int) -> Control | str:
    try:
        (connection, session), (pulse, pulses) = (
            open_connection(address, port, secret.encode(), PURPOSE, rank, timeout_s=CONNECT_S) for _ in range(2)
        )
        keep_alive(connection)
        keep_alive(pulse)
        pulse.sendall(pulses.seal(PULSE))
    except OSError as error:
        return f"{address} port {port}: {error}"
    return Control(connection, session, pulse=pulse)


def keep_alive(connection: socket.socket) -> None:
    """Have a quiet TCP connection fail within ten seconds when the other host falls silent, not after hours."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _QUIET_S), ("TCP_KEEPINTVL", _ASK_S), ("TCP_KEEPCNT", _QUESTIONS)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
