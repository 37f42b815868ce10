"""A server that serves only connections whose other side has proven the job's secret.

A client has 5 s for the handshake, in parallel with others; at the limit, accept_loop.py drops the oldest of the
address with the most connections. An agent waits 10 s for each step, and tries three times. So idle connections cannot
block agents while they fit into the system's queue (4,096, or net.core.somaxconn if that is less), which is accepted
within 4 s, even if each is opened again when it is dropped. A client that opens more connections can keep others out of
the queue, which all addresses share.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from hvdkit.errors import LaunchError
from hvdkit.handshake import ANSWER_BYTES, AuthenticationError, Challenge, Session
from hvdkit.launch.agent.wire import keep_alive
from hvdkit.launch.state.accept_loop import AcceptLoop
from hvdkit.launch.state.waiting import time_limit
from hvdkit.unproven import HANDSHAKE_S

HANDSHAKES = 512  # limit of handshakes at a time; more if the job may need them
_HANDSHAKE_S = {socket.AF_UNIX: 20.0}  # only this user's processes can use a Unix socket, and agents do not retry there
_BACKLOG = 4096  # ranks connect all at once, and a refused rank tries again after a second, then after three
_PORTS_TRIED = 20
_OTHER_FILES = 128
_MOST_FILES = 1 << 16  # a limit of 2**30, as containers have it, is slow in programs that close all files
_NOT_OWN = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class Channel:
    """A connection after its handshake.

    rank: the number that the other side has sent.
    received: number of bytes that read() has taken from the connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session, rank: int) -> None:
        self._reader, self._writer, self._session, self.rank = reader, writer, session, rank
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self._problem: AuthenticationError | None = None
        self.received = 0

    async def read(self) -> tuple[bytes, bytes]:
        """Wait for the next frame: (type, payload). Raises EOFError at the end, OSError, AuthenticationError."""
        while not self._frames:
            if self._problem is not None:
                raise self._problem
            data = await self._reader.read(1 << 16)
            if not data:
                raise EOFError
            self.received += len(data)
            try:
                self._frames.extend(self._session.receive(data))
            except AuthenticationError as error:
                self._problem = error
        return self._frames.popleft()

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a frame, unless the connection is closing."""
        if not self._writer.is_closing():
            self._writer.write(self._session.seal(kind, payload))

    async def send_raw(self, data: bytes) -> None:
        """Send bytes without a frame and without a code, and wait until the buffer has room; no frame may follow.

        Raises OSError.
        """
        self._writer.write(data)
        await self._writer.drain()

    def abort(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()


class AuthenticatedServer:
    """Listens, does the handshake, and calls `serve` for each connection, which is closed when `serve` returns.

    secret, purpose: see hvdkit.handshake.Challenge.
    serve: runs in a task for each connection; it handles its errors itself.
    processes: number of connections that the job itself may open at a time.
    """

    def __init__(
        self, secret: bytes, purpose: bytes, serve: Callable[[Channel], Awaitable[None]], processes: int = 0
    ) -> None:
        self._secret, self._purpose, self._serve = secret, purpose, serve
        self.accept_loop = AcceptLoop(self._greet, max(HANDSHAKES, processes), _BACKLOG, least=max(1, processes))

    def listen_unix(self, path: str) -> None:
        """Listen at a Unix socket. To be called, as all methods, by the loop's thread or before the loop runs."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        self.accept_loop.listen([listener])

    def listen_tcp(self, addresses: Sequence[str]) -> int:
        """Listen at the same port of these addresses of this machine; returns the port.

        Listens on all addresses if an address is not this machine's, but a gateway's that forwards the port (NAT).
        Raises LaunchError if no port is free on all of them.
        """
        listeners = _bind(addresses)
        self.accept_loop.listen(listeners)
        return int(listeners[0].getsockname()[1])

    def start(self) -> None:
        """Begin to accept."""
        self.accept_loop.start()

    async def wait_until_idle(self, seconds: float) -> None:
        """Wait until no authenticated connection is open, for `seconds` at most."""
        await self.accept_loop.wait_until_idle(seconds)

    async def close(self) -> None:
        """Stop listening, and drop every connection."""
        await self.accept_loop.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:
            keep_alive(connection)
        challenge = Challenge(self._secret, self._purpose)
        async with time_limit(_HANDSHAKE_S.get(connection.family, HANDSHAKE_S)):
            writer.write(challenge.nonce)
            proven = challenge.check(await reader.readexactly(ANSWER_BYTES))
        if proven is None:
            return
        self.accept_loop.prove()
        writer.write(proven.proof)
        await self._serve(Channel(reader, writer, proven.session, proven.rank))


class ServerThread:
    """Runs a server that listens in a thread of its own, until close()."""

    def __init__(self, server: AuthenticatedServer, name: str) -> None:
        self._server, self._loop = server, asyncio.new_event_loop()
        self._loop.call_soon(server.start)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def close(self, grace_s: float) -> None:
        """Stop when no authenticated connection is open any more, at the latest after grace_s seconds."""
        asyncio.run_coroutine_threadsafe(self._end(grace_s), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, grace_s: float) -> None:
        await self._server.wait_until_idle(grace_s)
        await self._server.close()


def raise_file_limit(files: int) -> Callable[[], None]:
    """Raise this process's limit of open files so that `files` fit, as far as the hard limit allows.

    Returns a function that restores the limit, for child processes, which must not inherit the new limit.
    """
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(_MOST_FILES, files + _OTHER_FILES)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _bind(addresses: Sequence[str]) -> list[socket.socket]:
    """Bind sockets to one free port of all these addresses."""
    try:
        for _ in range(_PORTS_TRIED):
            listeners: list[socket.socket] = []
            try:
                for address in dict.fromkeys(addresses):
                    port = listeners[0].getsockname()[1] if listeners else 0
                    listeners.append(_bind_one(address, port))
                return listeners
            except OSError as error:
                for listener in listeners:
                    listener.close()
                if error.errno != errno.EADDRINUSE:
                    raise
    except OSError as error:
        if error.errno in _NOT_OWN:
            return [_bind_all()]
        raise LaunchError(
            f"Cannot listen at {', '.join(addresses)}: {os.strerror(error.errno or 0)}.", code="address-not-usable"
        ) from None
    raise LaunchError(
        f"Cannot listen at {', '.join(addresses)}: {_PORTS_TRIED} ports were each in use at one of them.",
        code="no-port-free",
    )


def _bind_one(address: str, port: int) -> socket.socket:
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(place)
    except OSError:
        listener.close()
        raise
    return listener


def _bind_all() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
