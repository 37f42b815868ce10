"""The connection between agents and hvdrun: the types of its frames, and the variables of a start order.

hvdkit.handshake authenticates the frames.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from hvdkit.handshake import AuthenticationError, Session, StrangerError, connect, open_connection

PURPOSE = b"hvdrun"  # purpose of the handshake
HELLO, START, STDOUT, STDERR, PAUSE, END = b"H", b"S", b"O", b"E", b"Z", b"X"  # from an agent
STACKS = b"D"  # from an agent: the stacks of its rank's processes
STDIN = b"I"  # from the agent of rank 0: it accepts more; from hvdrun: bytes of its own stdin, b"" at the end
EVENT = b"N"  # messages of hvdkit.launcher_channel: from an agent those of its rank, from hvdrun those for a rank
HEARTBEAT = b"P"  # from an agent, on a second connection, as the only frame there
PROBE = b"Q"  # from hvdrun; ControlConnection.receive() answers with the same frame
GO, STOP, BYE, SIGNAL, WINDOW, ASK = b"G", b"T", b"B", b"K", b"W", b"A"  # from hvdrun; ASK: for STACKS
SAVE = b"V"  # from hvdrun: make the rank save and end, if it handles SIGTERM
ENDED_BY_HVDRUN = "hvdrun ended the job"  # why a rank was ended, in an END
# In the job's folder: Unix sockets for agents and for `hvdkit stacks`; the job's secret, if all ranks are on one host.
CONTROL, QUERY, SECRET = "control", "query", "secret"
CONNECT_S = 10.0
_SIGNALLED_S = 2.0  # less than launchers wait after SIGTERM
_LOOK_S = 2.0
# A host that does not answer for this long is lost: 3 s idle, then 5 probes 1 s apart.
_IDLE_S, _PROBE_S, _PROBES = 3, 1, 5


class HvdrunLost(Exception):
    """The connection to hvdrun failed or was lost."""


class ControlConnection:
    """The connection to hvdrun.

    address: this host's, as hvdrun sees it; "" on one host.
    heartbeat: a second connection over which nothing is sent, so that TCP keepalive checks the other host. On the first
    TCP sends no keepalive probes while output waits to be sent, because hvdrun does not read or the host has failed.
    """

    def __init__(self, connection: socket.socket, session: Session, heartbeat: socket.socket | None = None) -> None:
        self.socket, self.heartbeat, self._session = connection, heartbeat, session
        self.address = str(connection.getsockname()[0]) if heartbeat is not None else ""

    @property
    def sources(self) -> list[int]:
        """The file descriptors to poll for `receive`."""
        return [self.socket.fileno(), *([self.heartbeat.fileno()] if self.heartbeat is not None else [])]

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send one frame. Raises HvdrunLost."""
        view = memoryview(self._session.seal(kind, payload))
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        if self.heartbeat is not None:
            poll.register(self.heartbeat, select.POLLIN)
        while view:
            self._check(dict(poll.poll()))
            view = view[self._send_some(view) :]

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Wait for some bytes and return the frames that are complete, after answering hvdrun's probes among them.

        Raises HvdrunLost at the connection's end.
        """
        poll = select.poll()
        for source in self.sources:
            poll.register(source, select.POLLIN)
        self._check(dict(poll.poll()))
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise HvdrunLost("hvdrun has closed the connection, or was killed")
        try:
            frames = list(self._session.receive(data))
        except AuthenticationError as error:
            raise HvdrunLost(
                f"{error}. A process between this host and hvdrun's may be altering the connection"
            ) from None
        for _ in filter(lambda frame: frame[0] == PROBE, frames):
            self.send(PROBE)
        return [frame for frame in frames if frame[0] != PROBE]

    def finish(self, seconds: float, is_signalled: Callable[[], bool]) -> None:
        """Send no more, and wait until hvdrun has read everything and has closed the connection.

        If this side closed at once, a frame from hvdrun that is on its way would break the connection, and hvdrun would
        lose the frames that it has not read yet, as the report of the rank's end.

        seconds: time after which the wait ends, for a hvdrun that is stopped.
        is_signalled: returns True if the launcher wants this process to end; then the wait ends after two seconds.
        """
        deadline, poll = time.monotonic() + seconds, select.poll()
        for source in self.sources:
            poll.register(source, select.POLLIN)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            while (now := time.monotonic()) < deadline:
                if is_signalled():
                    deadline = min(deadline, now + _SIGNALLED_S)  # that of the first turn, which later ones exceed
                ready = [source for source, _ in poll.poll(100)]
                if self.socket.fileno() in ready:
                    if not self.socket.recv(1 << 16):
                        return
                elif ready:  # the heartbeat: hvdrun's host does not answer
                    return

    def _send_some(self, view: memoryview) -> int:
        try:
            return self.socket.send(view, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise HvdrunLost(f"nothing can be sent to hvdrun: {error.strerror}") from None

    def _check(self, ready: dict[int, int]) -> None:
        # hvdrun sends nothing over the heartbeat connection: it can only report its end.
        if self.heartbeat is not None and self.heartbeat.fileno() in ready and self.socket.fileno() not in ready:
            raise HvdrunLost("the host of hvdrun does not answer, or hvdrun was killed")


def connect_to_hvdrun(place: str, secret: str, rank: int) -> ControlConnection:
    """Connect to hvdrun.

    place: "unix:PATH", with the secret in a file beside it; or "tcp:PORT:ADDRESS,ADDRESS,...", of which the first
    address that proves the secret is used. secret: of the job, for TCP. Raises HvdrunLost with the addresses that were
    tried.
    """
    family, _, rest = place.partition(":")
    if family == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with open(os.path.join(os.path.dirname(rest), SECRET), "rb") as file:
                of_job = file.read()
            connection.connect(rest)
            return ControlConnection(connection, connect(connection, of_job, PURPOSE, rank))
        except OSError as error:
            raise HvdrunLost(f"cannot connect to hvdrun at {rest}: {error}") from None
    port, _, addresses = rest.partition(":")
    problems = []
    for address in addresses.split(","):
        answer = _try_address(address, int(port), secret, rank)
        if isinstance(answer, ControlConnection):
            return answer
        problems.append(answer)
    raise HvdrunLost(f"cannot connect to hvdrun: {'; '.join(problems)}")


def probe_hvdrun(place: str, secret: str) -> bool | None:
    """Is hvdrun running? None if nothing answers. place: as for connect_to_hvdrun, over TCP."""
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


def _try_address(address: str, port: int, secret: str, rank: int) -> ControlConnection | str:
    try:
        (connection, session), (heartbeat, heartbeats) = (
            open_connection(address, port, secret.encode(), PURPOSE, rank, timeout_s=CONNECT_S) for _ in range(2)
        )
        keep_alive(connection)
        keep_alive(heartbeat)
        heartbeat.sendall(heartbeats.seal(HEARTBEAT))
    except OSError as error:
        return f"{address} port {port}: {error}"
    return ControlConnection(connection, session, heartbeat=heartbeat)


def keep_alive(connection: socket.socket) -> None:
    """Make an idle TCP connection fail within ten seconds, not hours, when the other host does not answer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


#: The variables that hvdrun sets for a rank after all ranks have registered, and that its agent accepts; see
#: plan_start_orders in hvdkit/launch/plan/registration.py. Other variables are in the environment from the launcher.
PLANNED_VARIABLES = frozenset(
    {
        *("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_osc", "OMPI_MCA_btl_tcp_if_include"),
        *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "FI_TCP_IFACE"),
        *("HVDKIT_HOST_SLOTS", "NCCL_HOSTID"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME"),
        *("KERAS_DISTRIBUTION_JOB_ADDRESSES", "KERAS_DISTRIBUTION_NUM_PROCESSES", "KERAS_DISTRIBUTION_PROCESS_ID"),
        *("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "no_grpc_proxy"),
    }
)


def find_unplanned(names: Iterable[str]) -> list[str]:
    """Find the variables that hvdrun never sets."""
    return sorted(set(names) - PLANNED_VARIABLES)


def read_start_order(payload: bytes) -> dict[str, Any]:
    """Parse the payload of a GO frame. Raises HvdrunLost for an order that hvdrun does not send."""
    try:
        orders = json.loads(payload)
        variables = dict(orders["variables"])
    except (ValueError, RecursionError, KeyError, TypeError):
        raise HvdrunLost(
            f"the start order is malformed: {payload[:80]!r}. Check that all hosts have the same hvdkit"
        ) from None
    unplanned = find_unplanned(variables)
    if unplanned or not all(isinstance(value, str) for value in variables.values()):
        names = ", ".join(unplanned) or "a value that is not a string"
        raise HvdrunLost(
            f"the start order sets {names}, which hvdrun never sets. This host has another version of hvdkit, or "
            "another process has altered the connection"
        )
    return {**orders, "variables": variables}
