"""A server that hands on only connections whose other side has proven the job's secret.

Whoever connects has 5 s for the handshake, beside others who do the same. When as many are at it as may be, the one
that has been at it for longest is dropped for the next one, after a moment in which a process of the job answers; it
tries again if it was one. So connections over which nothing comes keep nobody out.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from hvdkit.errors import LaunchError
from hvdkit.handshake import ANSWER_BYTES, AuthenticationError, Challenge, Session
from hvdkit.launch.agent.wire import keep_alive

HANDSHAKES = 64  # at a time, or as many as the job may need
_HANDSHAKE_S = {socket.AF_UNIX: 20.0}  # on a Unix socket there are no strangers, and nobody tries again
_TCP_HANDSHAKE_S = 5.0
_GRACE_S = 0.5  # before a handshake is dropped for another one
_PAUSE_S = 0.1
_BACKLOG = 4096  # ranks come all at once, and one that is turned away tries again after a second, then after three
_PORTS_TRIED = 20
_OTHER_FILES = 128
_MOST_FILES = 1 << 16  # a limit of 2**30, as containers have it, is slow in programs that close all files
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NOT_OWN = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class ChangeEvent(asyncio.Event):
    """Is set whenever something has changed that others may wait for."""

    async def wait_until(self, true: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition is true, which is checked after each change, but at most so long."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with time_limit(seconds):
                while not true():
                    self.clear()  # not wait_for(): another waiter may clear before its task begins to wait
                    await self.wait()


class Channel:
    """A connection after its handshake. rank: of the other side, by its word."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session, rank: int) -> None:
        self._reader, self._writer, self._session, self.rank = reader, writer, session, rank
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self._problem: AuthenticationError | None = None

    async def read(self) -> tuple[bytes, bytes]:
        """Wait for the next frame: (type, payload). Raises EOFError at the end, OSError, AuthenticationError."""
        while not self._frames:
            if self._problem is not None:
                raise self._problem
            data = await self._reader.read(1 << 16)
            if not data:
                raise EOFError
            try:
                self._frames.extend(self._session.receive(data))
            except AuthenticationError as error:
                self._problem = error
        return self._frames.popleft()

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a frame, unless the connection is being closed."""
        if not self._writer.is_closing():
            self._writer.write(self._session.seal(kind, payload))

    async def send_raw(self, data: bytes) -> None:
        """Send bytes without a frame and without a code, and wait for room; no frame may follow. Raises OSError."""
        self._writer.write(data)
        await self._writer.drain()

    def abort(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()


class AuthenticatedServer:
    """Listens, shakes hands, and calls `serve` for each connection; the connection is closed when that returns.

    secret, purpose: see hvdkit.handshake.Challenge. serve: one task a connection; it handles its errors itself.
    processes: connections that the job itself may open at a time.
    """

    def __init__(
        self, secret: bytes, purpose: bytes, serve: Callable[[Channel], Awaitable[None]], processes: int = 0
    ) -> None:
        self._secret, self._purpose, self._serve = secret, purpose, serve
        self._most = max(HANDSHAKES, processes)
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: dict[asyncio.Task[None], float] = {}  # since when, the oldest first
        self._serving: set[asyncio.Task[None]] = set()
        self._fewer = ChangeEvent()

    def listen_unix(self, path: str) -> None:
        """Listen at a Unix socket. To be called, as all methods, by the loop's thread or before the loop runs."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        self._listen([listener])

    def listen_tcp(self, addresses: Sequence[str]) -> int:
        """Listen at one port of these addresses of this machine; returns the port.

        On all addresses if one is not this machine's own, but of what stands before it and forwards the port (NAT).
        Raises LaunchError if no port is free on all of them.
        """
        listeners = _bind(addresses)
        self._listen(listeners)
        return int(listeners[0].getsockname()[1])

    def _listen(self, listeners: Sequence[socket.socket]) -> None:
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(_BACKLOG)
        self._sockets = list(listeners)

    def start(self) -> None:
        """Begin to accept."""
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in self._sockets]

    async def wait_until_idle(self, seconds: float) -> None:
        """Wait until nobody who has proven the secret is connected, at most so long."""
        if self._serving:
            await asyncio.wait(self._serving, timeout=seconds)

    async def close(self) -> None:
        """Stop listening, and drop every connection."""
        for task in (*self._accepting, *self._handshakes, *self._serving):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._handshakes, *self._serving, return_exceptions=True)
        for listener in self._sockets:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._make_room()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # who came has gone again, or there is no room for another file
                if error.errno in _FULL:
                    self._drop_oldest(len(self._handshakes) // 2 + 1)
                await asyncio.sleep(_PAUSE_S)
                continue
            task = asyncio.create_task(self._greet(connection))
            self._handshakes[task] = loop.time()
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)

    async def _make_room(self) -> None:
        while len(self._handshakes) >= self._most:
            left = next(iter(self._handshakes.values())) + _GRACE_S - asyncio.get_running_loop().time()
            if left <= 0:
                self._drop_oldest(1)
                left = _GRACE_S
            await self._fewer.wait_until(lambda: len(self._handshakes) < self._most, left)

    def _drop_oldest(self, count: int) -> None:
        for task in list(self._handshakes)[:count]:
            task.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        self._serving.discard(task)
        self._fewer.set()

    async def _greet(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        writer: asyncio.StreamWriter | None = None
        try:
            if connection.family != socket.AF_UNIX:
                keep_alive(connection)
            reader, writer = await asyncio.open_connection(sock=connection)
            challenge = Challenge(self._secret, self._purpose)
            async with time_limit(_HANDSHAKE_S.get(connection.family, _TCP_HANDSHAKE_S)):
                writer.write(challenge.nonce)
                proven = challenge.check(await reader.readexactly(ANSWER_BYTES))
            if proven is None:
                return
            self._handshakes.pop(task, None)
            self._serving.add(task)
            self._fewer.set()
            writer.write(proven.proof)
            await self._serve(Channel(reader, writer, proven.session, proven.rank))
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # a stranger, or one that went away, or the end
        finally:
            if writer is None:
                connection.close()
            else:
                writer.close()


class ServerThread:
    """Runs a server that listens in a thread of its own, until close()."""

    def __init__(self, server: AuthenticatedServer, name: str) -> None:
        self._server, self._loop = server, asyncio.new_event_loop()
        self._loop.call_soon(server.start)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def close(self, grace_s: float) -> None:
        """Stop when nobody is connected any more, at the latest after grace_s seconds."""
        asyncio.run_coroutine_threadsafe(self._end(grace_s), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, grace_s: float) -> None:
        await self._server.wait_until_idle(grace_s)
        await self._server.close()


def raise_file_limit(files: int) -> Callable[[], None]:
    """Raise this process's limit of open files to what the administrator allows, so that `files` fit and some more.

    Returns what sets it back, to be called in child processes, which are not to inherit it.
    """
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(_MOST_FILES, files + _OTHER_FILES)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout, which Python 3.10 has not."""
    task = asyncio.current_task()
    assert task is not None
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        yield
    except asyncio.CancelledError:
        if expired:
            raise asyncio.TimeoutError from None
        raise
    finally:
        timer.cancel()


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
        raise LaunchError(f"Cannot listen at {', '.join(addresses)}: {os.strerror(error.errno or 0)}.") from None
    raise LaunchError(f"Cannot listen at {', '.join(addresses)}: {_PORTS_TRIED} ports were each in use at one of them.")


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
