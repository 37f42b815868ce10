"""Connections between the agents: which host answers at an address, and how fast data comes from it.

Each agent listens during the survey. It accepts the survey's other agents only, which have its secret from their
standard input. Each host has a purpose of its own in the handshake, so that no host is mistaken for another one.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time

from hvdkit.handshake import AuthenticationError, open_connection
from hvdkit.launch.job.authenticated_server import AuthenticatedServer, Channel

_CONNECT_S = 2.5
_STREAM_S = 0.25
_STREAM = b"S"
_CHUNK = bytes(1 << 18)
_HANDSHAKES = 1024  # of the other agents, at a time
_EVERY_ADDRESS = ("0.0.0.0", "::")


class Responder:
    """Answers at a port of all addresses until the process ends, and sends zeros to an agent that asks for data."""

    def __init__(self, secret: str, host: str) -> None:
        self._server = AuthenticatedServer(secret.encode(), _purpose(host), self._serve, _HANDSHAKES)
        self.port = self._server.listen_tcp(_EVERY_ADDRESS)
        loop = asyncio.new_event_loop()
        loop.call_soon(self._server.start)
        threading.Thread(target=loop.run_forever, name="hvdkit-doctor-responder", daemon=True).start()

    async def _serve(self, channel: Channel) -> None:
        await channel.read()
        end = time.monotonic() + 2 * _STREAM_S
        while time.monotonic() < end:
            await channel.send_raw(_CHUNK)


def try_connection(address: str, port: int, secret: str, host: str) -> str:
    """Connect to the agent of a host; "" if it answers, else the problem as in ConnectionAttempt."""
    try:
        open_connection(address, port, secret.encode(), _purpose(host), timeout_s=_CONNECT_S, tries=1)[0].close()
    except OSError as error:
        return describe(error)
    return ""


def measure_bandwidth(address: str, port: int, secret: str, host: str) -> float:
    """Receive data from the agent of a host for a moment; returns Mbit/s, 0.0 if none came."""
    try:
        connection, session = open_connection(
            address, port, secret.encode(), _purpose(host), timeout_s=_CONNECT_S, tries=1
        )
        with connection:
            connection.settimeout(_CONNECT_S)
            connection.sendall(session.seal(_STREAM))
            return _receive(connection)
    except OSError:
        return 0.0


def describe(error: OSError) -> str:
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
    connection.recv_into(room)  # the first burst is faster: it has been buffered
    begin, received = time.monotonic(), 0
    while (passed := time.monotonic() - begin) < _STREAM_S:
        count = connection.recv_into(room)
        if not count:
            break
        received += count
    return received * 8e-6 / passed if passed > 0 else 0.0
