"""doctor's agent on each host: it answers requests, a line of JSON each, until its input ends.

{"do": "collect", ...}  ->  {"answer": ...}   or   {"error": "..."}

The agents connect to each other, to find out which host answers at an address, and how fast data comes from it. Each
agent listens during the survey. It accepts only the other agents, which have the secret from their standard input. The
handshake includes the host's name, so that no host is mistaken for another one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from hvdkit import __version__
from hvdkit.config import read_environment
from hvdkit.handshake import AuthenticationError, Session, open_connection
from hvdkit.launch.detect.hosts import resolve
from hvdkit.launch.process import run_program
from hvdkit.launch.state.authenticated_server import AuthenticatedServer, Channel, ServerThread
from hvdkit.tools.doctor.collect.host import collect
from hvdkit.tools.doctor.hosts.session import LOGIN, ssh_argv

_CONNECT_S = 2.5
_STREAM_S = 0.25
_STREAM = b"S"
_CHUNK = bytes(1 << 18)
_HANDSHAKES = 1024  # largest number of concurrent handshakes with other agents
_EVERY_ADDRESS = ("0.0.0.0", "::")


def start_responder(secret: str, host: str) -> int:
    """Answer on a port of all addresses until the process ends, and send zeros to an agent that requests data."""
    server = AuthenticatedServer(secret.encode(), _purpose(host), _send_zeros, _HANDSHAKES)
    port = server.listen_tcp(_EVERY_ADDRESS)
    ServerThread(server, "hvdkit-doctor-responder")
    return port


async def _send_zeros(channel: Channel) -> None:
    await channel.read()
    end = time.monotonic() + 2 * _STREAM_S
    while time.monotonic() < end:
        await channel.send_raw(_CHUNK)


def try_connection(address: str, port: int, secret: str, host: str) -> str:
    """Connect to the agent of a host; returns "" if it answers, else the problem as in ConnectionAttempt.

    address, port: where to connect.
    secret: the secret of the survey.
    host: the host that should answer.
    """
    try:
        _connect_to(address, port, secret, host)[0].close()
    except OSError as error:
        return describe_failure(error)
    return ""


def measure_bandwidth(address: str, port: int, secret: str, host: str) -> float:
    """Receive data from the agent of a host for a moment; returns Mbit/s, 0.0 if no data came.

    address, port: where to connect.
    secret: the secret of the survey.
    host: the host that should answer.
    """
    try:
        connection, session = _connect_to(address, port, secret, host)
        with connection:
            connection.settimeout(_CONNECT_S)
            connection.sendall(session.seal(_STREAM))
            return _receive(connection)
    except OSError:
        return 0.0


def _connect_to(address: str, port: int, secret: str, host: str) -> tuple[socket.socket, Session]:
    return open_connection(address, port, secret.encode(), _purpose(host), timeout_s=_CONNECT_S, tries=1)


def describe_failure(error: OSError) -> str:
    """Describe why a connection failed: "timeout", "refused", "other" (not the agent), or the system's message."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, (AuthenticationError, ConnectionResetError)):
        return "other"
    return error.strerror or str(error)


def _purpose(host: str) -> bytes:
    return f"doctor {host}".encode()


def _receive(connection: socket.socket) -> float:
    room = bytearray(1 << 20)
    connection.recv_into(room)  # ignore the first burst, which was buffered and is faster
    begin, received = time.monotonic(), 0
    while (passed := time.monotonic() - begin) < _STREAM_S:
        count = connection.recv_into(room)
        if not count:
            break
        received += count
    return received * 8e-6 / passed if passed > 0 else 0.0


#: Seconds after which an agent ends at the latest if its doctor was killed.
_LONGEST_S = 120
_LOGIN_TIMEOUT_S = 12.0


def _collect(*, variables: Mapping[str, str], names: list[str], secret: str, host: str) -> dict[str, Any]:
    """Collect all facts and the addresses of names, and begin to answer other agents on a port, as this host.

    variables: variables of the job's ranks, which override those of this login.
    """
    with ThreadPoolExecutor() as pool:
        addresses = pool.map(resolve, names)
        facts = asdict(collect({**read_environment(), **variables}))
        return {"facts": facts, "addresses": list(addresses), "port": start_responder(secret, host)}


def _connect(*, secret: str, targets: list[tuple[str, int, str, bool]]) -> list[tuple[str, float]]:
    """Try connections to (address, port, host, measured); returns the problem of each, "" for none, and Mbit/s.

    The bandwidth is measured once an address, one after another, where `measured` is true; else it is 0.0.
    """
    with ThreadPoolExecutor(32) as pool:
        problems = list(pool.map(lambda target: try_connection(target[0], target[1], secret, target[2]), targets))
    speeds: dict[str, float] = {}
    for (address, port, host, measured), problem in zip(targets, problems, strict=True):
        if measured and not problem and address not in speeds:
            speeds[address] = measure_bandwidth(address, port, secret, host)
    return [
        (problem, speeds.get(address, 0.0) if measured and not problem else 0.0)
        for (address, _, _, measured), problem in zip(targets, problems, strict=True)
    ]


def _login(*, logins: list[str], options: list[str]) -> list[dict[str, Any] | None]:
    """Try ssh; returns None for a login that works, else the status and the output of ssh."""

    def log_in(login: str) -> dict[str, Any] | None:
        argv = ssh_argv(login, ["echo", LOGIN], options)
        result = run_program(argv, environ=read_environment(), timeout_s=_LOGIN_TIMEOUT_S)
        if result.status == 0 and LOGIN in result.stdout:
            return None
        return {"status": result.status, "said": result.stderr or result.stdout}

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(log_in, logins))


_REQUESTS: dict[str, Callable[..., Any]] = {
    "clock": time.time,
    "collect": _collect,
    "connect": _connect,
    "login": _login,
}


def main() -> int:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps output of libraries out of the answers
    signal.alarm(_LONGEST_S)
    print(json.dumps({"hello": __version__}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"answer": _REQUESTS[request.pop("do")](**request)}
        except Exception as error:  # doctor reports it; the end of the agent would show less
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers)
    os._exit(0)  # threads may still wait for connections


if __name__ == "__main__":
    main()
