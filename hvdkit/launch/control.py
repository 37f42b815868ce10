"""hvdrun's side of the connections to the rank agents."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import resource
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdkit.launch.agent import wire
from hvdkit.launch.arrivals import Arrival, check_arrival, parse_arrival
from hvdkit.launch.ranks import Ranks
from hvdkit.launch.reports import parse_end, parse_report, parse_start

_HANDSHAKE_S = 20.0
_LARGEST_FRAME = 64 << 20
_OTHER_FILES = 128  # beside two connections of each rank
_BACKLOG = 4096  # ranks come all at once, and one that is turned away tries again after a second, then after three


@dataclass
class Control:
    """Listens for the agents, keeps `ranks` up to date and hands their output on.

    Jobs on one host meet at a Unix socket in the job's folder. Others meet over TCP, where both sides prove with a
    secret of this job that they belong to it; output is not encrypted.

    write: takes (rank, is it stderr, data).
    changed: called after every arrival, start, end or loss.
    heard: takes (rank, what its agent answers to an inquiry).
    arrivals: what each agent has said of itself; it waits for `release`.
    problem: why an agent was turned away, as a sentence; "" if none was.
    elastic: ranks may come later, which other ranks have started.
    """

    ranks: Ranks
    write: Callable[[int, bool, bytes], None]
    changed: Callable[[], None]
    heard: Callable[[int, bytes], None]
    variables: dict[str, str] = field(default_factory=dict)
    connected: dict[int, asyncio.StreamWriter] = field(default_factory=dict)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    problem: str = ""
    elastic: bool = False
    _ending: bool = False
    _secret: str = ""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def open(self, addresses: Iterable[str], folder: str) -> None:
        """Begin to listen; `variables` then tell the agents where.

        addresses: this machine's, as other hosts reach it; () if all ranks are on this host.
        folder: the job's, which nobody else can open.
        """
        if not addresses:
            path = os.path.join(folder, wire.CONTROL)
            self._server = await asyncio.start_unix_server(self._serve, path, backlog=_BACKLOG)
            self.variables = {"HVDKIT_CONTROL": f"unix:{path}"}
            return
        _make_room(2 * self.ranks.size + _OTHER_FILES)
        self._secret = secrets.token_hex(32)
        self._server = await asyncio.start_server(self._serve, sock=_listen(), backlog=_BACKLOG)
        port = self._server.sockets[0].getsockname()[1]
        self.variables = {
            "HVDKIT_CONTROL": f"tcp:{port}:{','.join(addresses)}",
            "HVDKIT_CONTROL_SECRET": self._secret,
        }

    async def close(self) -> None:
        """Stop listening and drop every agent; one that is still there ends its rank."""
        self._ending = True
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def release(self, orders: Mapping[int, Mapping[str, Any]]) -> None:
        """Let the ranks start their commands. orders: by rank."""
        for rank, each in orders.items():
            self.send(rank, wire.GO, json.dumps(each).encode())

    def stop(self) -> None:
        """Tell every agent to end its rank, and any that comes later to go away."""
        self._ending = True
        for rank in self.connected:
            self.send(rank, wire.STOP)

    def send(self, rank: int, kind: bytes, payload: bytes = b"") -> None:
        """Send a rank's agent one frame; one that has gone is left alone."""
        writer = self.connected.get(rank)
        if writer is not None and not writer.is_closing():
            writer.write(wire.HEADER.pack(kind, len(payload)) + payload)

    def send_all(self, kind: bytes, payload: bytes = b"") -> list[int]:
        """Send every agent one frame; returns their ranks."""
        for rank in self.connected:
            self.send(rank, kind, payload)
        return sorted(self.connected)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        rank = None
        if self._secret:
            wire.keep_alive(writer.get_extra_info("socket"))
        try:
            async with _time_limit(_HANDSHAKE_S):
                if self._secret and not await self._shake_hands(reader, writer):
                    return
                kind, payload = await _read_frame(reader)
            if kind == wire.PULSE:
                await self._feel(int(payload), reader)
                return
            rank = self._greet(kind, payload, writer)
            while rank is not None:
                self._take(rank, *await _read_frame(reader))
        except (OSError, EOFError, ValueError, struct.error, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # not an agent, or one that went away, or the end: a rank without an end is seen as lost below
        finally:
            self._tasks.discard(task)
            writer.close()
            if rank is not None:
                del self.connected[rank]
                self.ranks.lose(rank)
                self.changed()

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        mine = os.urandom(wire.NONCE_BYTES)
        writer.write(mine)
        theirs = await reader.readexactly(wire.NONCE_BYTES)
        proof = await reader.readexactly(wire.NONCE_BYTES)
        if not hmac.compare_digest(proof, wire.sign(self._secret, b"agent", mine, theirs)):
            return False
        writer.write(wire.sign(self._secret, b"hvdrun", theirs, mine))
        return True

    async def _feel(self, rank: int, reader: asyncio.StreamReader) -> None:
        """Drop a rank whose host has fallen silent; an agent that merely ends is left to say so itself."""
        try:
            await reader.read()
        except OSError as error:
            if not isinstance(error, ConnectionError):
                self.ranks.fall_silent(rank)
            writer = self.connected.get(rank)
            if writer is not None:
                writer.transport.abort()

    def _greet(self, kind: bytes, payload: bytes, writer: asyncio.StreamWriter) -> int | None:
        if kind != wire.HELLO or self._ending:
            return None
        arrival = parse_arrival(parse_report(payload))
        problem = check_arrival(arrival, self.ranks.size, self.ranks.hosts)
        if arrival.joins and not self.elastic:
            return None
        if problem:
            self.problem = self.problem or problem
            self.changed()
            return None
        self.connected[arrival.rank] = writer
        self.arrivals[arrival.rank] = arrival
        self.ranks.hosts[arrival.rank] = arrival.host
        self.changed()
        return arrival.rank

    def _take(self, rank: int, kind: bytes, payload: bytes) -> None:
        if kind in (wire.STDOUT, wire.STDERR):
            self.write(rank, kind == wire.STDERR, payload)
        elif kind == wire.START:
            self.ranks.start(rank, parse_start(payload))
            self.changed()
        elif kind == wire.DOING:
            self.heard(rank, payload)
        elif kind == wire.NEWS:
            self.ranks.hear(rank, payload.decode(errors="replace").split())
            self.changed()
        elif kind == wire.PAUSE:
            self.ranks.pause(rank, int(payload))
            self.changed()
        elif kind == wire.END:
            self.ranks.end(rank, parse_end(payload))
            if self._ending:
                self.send(rank, wire.BYE)
            self.changed()


async def _read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    kind, length = wire.HEADER.unpack(await reader.readexactly(wire.HEADER.size))
    if length > _LARGEST_FRAME:
        raise ValueError("not a frame")
    return kind, await reader.readexactly(length)


def _make_room(files: int) -> None:
    """Let this process have so many files open, as far as the system's administrator does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < files:
        wanted = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


@contextlib.asynccontextmanager
async def _time_limit(seconds: float) -> AsyncIterator[None]:
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
