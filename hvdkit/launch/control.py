"""hvdrun's side of the connections to the rank agents."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdkit.handshake import AuthenticationError
from hvdkit.launch.agent import wire
from hvdkit.launch.arrivals import Arrival, check_arrival, parse_arrival
from hvdkit.launch.authenticated_server import HANDSHAKES, AuthenticatedServer, Channel, raise_file_limit, time_limit
from hvdkit.launch.ranks import Ranks
from hvdkit.launch.reports import parse_end, parse_report, parse_start

_FIRST_FRAME_S = 20.0


@dataclass
class Control:
    """Listens for the agents, keeps `ranks` up to date and hands their output on.

    Jobs on one host meet at a Unix socket in the job's folder, where the job's secret is too. Others meet over TCP, and
    have the secret from their environment. Both sides prove it, and each frame bears a code that only they can make;
    output is not encrypted.

    write: takes (rank, is it stderr, data).
    changed: called after every arrival, start, end or loss.
    heard: takes (rank, what its agent answers to an inquiry).
    arrivals: what each agent has said of itself; it waits for `release`.
    problem: why an agent was turned away, as a sentence; "" if none was.
    elastic: ranks may come later, which other ranks have started. restore_files: for child processes, see
    raise_file_limit.
    """

    ranks: Ranks
    write: Callable[[int, bool, bytes], None]
    changed: Callable[[], None]
    heard: Callable[[int, bytes], None]
    variables: dict[str, str] = field(default_factory=dict)
    connected: dict[int, Channel] = field(default_factory=dict)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    problem: str = ""
    elastic: bool = False
    restore_files: Callable[[], None] | None = None
    _ending: bool = False
    _server: AuthenticatedServer | None = None

    async def open(self, addresses: Iterable[str], folder: str) -> None:
        """Begin to listen; `variables` then tell the agents where.

        addresses: this machine's, as other hosts reach it; () if all ranks are on this host.
        folder: the job's, which nobody else can open.
        """
        secret, processes = secrets.token_hex(32), 2 * self.ranks.size
        self._server = AuthenticatedServer(secret.encode(), wire.PURPOSE, self._serve, processes)
        addresses = tuple(addresses)
        if addresses:
            self.restore_files = raise_file_limit(processes + max(HANDSHAKES, processes))
            port = self._server.listen_tcp(addresses)
            self.variables = {
                "HVDKIT_CONTROL": f"tcp:{port}:{','.join(addresses)}",
                "HVDKIT_CONTROL_SECRET": secret,
            }
        else:
            file = os.open(os.path.join(folder, wire.SECRET), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as target:
                target.write(secret)
            path = os.path.join(folder, wire.CONTROL)
            self._server.listen_unix(path)
            self.variables = {"HVDKIT_CONTROL": f"unix:{path}"}
        self._server.start()

    async def close(self) -> None:
        """Stop listening and drop every agent; one that is still there ends its rank."""
        self._ending = True
        if self._server is not None:
            await self._server.close()
        if self.restore_files is not None:
            self.restore_files()

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
        channel = self.connected.get(rank)
        if channel is not None:
            channel.send(kind, payload)

    def send_all(self, kind: bytes, payload: bytes = b"") -> list[int]:
        """Send every agent one frame; returns their ranks."""
        for rank in self.connected:
            self.send(rank, kind, payload)
        return sorted(self.connected)

    async def _serve(self, channel: Channel) -> None:
        rank = None
        try:
            async with time_limit(_FIRST_FRAME_S):
                kind, payload = await channel.read()
            if kind == wire.PULSE:
                await self._feel(channel)
                return
            rank = self._greet(kind, payload, channel)
            while rank is not None:
                self._take(rank, *await channel.read())
        except AuthenticationError as error:
            if rank is not None:
                self.ranks.suspect(rank, str(error))
        except (OSError, EOFError, ValueError, struct.error, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # not an agent, or one that went away, or the end: a rank without an end is seen as lost below
        finally:
            if rank is not None:
                del self.connected[rank]
                self.ranks.lose(rank)
                self.changed()

    async def _feel(self, channel: Channel) -> None:
        """Drop a rank whose host has fallen silent; an agent that merely ends is left to say so itself."""
        try:
            await channel.read()
        except EOFError:
            pass
        except OSError as error:
            if isinstance(error, AuthenticationError):
                self.ranks.suspect(channel.rank, str(error))
            elif not isinstance(error, ConnectionError):
                self.ranks.fall_silent(channel.rank)
            connected = self.connected.get(channel.rank)
            if connected is not None:
                connected.abort()

    def _greet(self, kind: bytes, payload: bytes, channel: Channel) -> int | None:
        if kind != wire.HELLO or self._ending:
            return None
        arrival = parse_arrival(parse_report(payload))
        problem = check_arrival(arrival, self.ranks.size, self.ranks.hosts)
        if arrival.rank != channel.rank or (arrival.joins and not self.elastic):
            return None
        if problem:
            self.problem = self.problem or problem
            self.changed()
            return None
        self.connected[arrival.rank] = channel
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
