"""hvdrun's side of the connections to the rank agents, and the parsers of their reports.

The parsers raise ValueError for a malformed report.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdkit.handshake import AuthenticationError
from hvdkit.launch.agent import wire
from hvdkit.launch.plan.registration import Registration, check_registration, parse_registration
from hvdkit.launch.plan.resources import take_fields
from hvdkit.launch.state.authenticated_server import (
    HANDSHAKES,
    AuthenticatedServer,
    Channel,
    raise_file_limit,
)
from hvdkit.launch.state.ranks import End, Ranks, Start
from hvdkit.launch.state.standard_input import StandardInput
from hvdkit.launch.state.waiting import ChangeEvent, time_limit


def parse_report(payload: bytes) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        found = json.loads(payload)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{payload[:40]!r} is not a JSON object")
    return found


def parse_start(payload: bytes) -> Start:
    """Parse the report that a rank's command was started."""
    return Start(*take_fields(parse_report(payload), "a START report", pid=int, threads=str, cpus=str, bound=bool))


def parse_end(payload: bytes) -> End:
    """Parse the report of how a rank's command has ended."""
    kinds = {"code": int, "signal": int, "ended_by": str, "tail": list, "time": float, "tail_of_stderr": bool}
    code, number, ended_by, tail, time, of_stderr = take_fields(parse_report(payload), "an END report", **kinds)
    return End(code, number, ended_by, tuple(map(str, tail)), time, of_stderr)


def parse_stacks(payload: bytes) -> tuple[int, list[dict[str, Any]]]:
    """Parse the answer to a query, see agent/stacks.py: its number, and the stacks of each process."""
    query, processes = take_fields(parse_report(payload), "a STACKS report", query=int, processes=list)
    return query, parse_processes(processes)


def parse_processes(processes: object) -> list[dict[str, Any]]:
    """Check a list of processes with their stacks."""
    if not isinstance(processes, list):
        raise ValueError(f"{processes!r} is not a list of processes")
    for one in processes:
        take_fields(one, "a process", pid=int, state=str, command=str, stacks=str, asked=bool)
    return processes


_FIRST_FRAME_S = 20.0
_STACKS_S = 4.0  # agents need less than two seconds


@dataclass
class ControlServer:
    """Accepts the connections of the agents, keeps `ranks` up to date, and relays the ranks' output.

    Agents on this host connect to a Unix socket in the job's folder, which also has the job's secret. If the job has
    other hosts, all agents connect over TCP, with the secret from their environment. Both sides prove the secret, and
    each frame has a code that only they can make; output is not encrypted.
    """

    ranks: Ranks
    on_output: Callable[[int, bool, bytes], None]  # takes (rank, is it stderr, data)
    elastic: bool = False  # other ranks may start ranks later
    stdin: StandardInput | None = None  # for rank 0; None: at its end
    #: Set after each registration, start, event, end and loss of a rank.
    changed: ChangeEvent = field(default_factory=ChangeEvent)
    variables: dict[str, str] = field(default_factory=dict)  # the agents read this server's address from them
    connected: dict[int, Channel] = field(default_factory=dict)
    arrivals: dict[int, Registration] = field(default_factory=dict)  # by rank; an agent then waits for release()
    orders: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by rank, what release() has sent
    problem: str = ""  # why an agent was refused, as a sentence; "" if none was
    restore_files: Callable[[], None] | None = None  # for child processes, see raise_file_limit
    _stacks: dict[int, dict[int, Any]] = field(default_factory=dict)  # by query and rank
    _queries: int = 0
    _answered: ChangeEvent = field(default_factory=ChangeEvent)
    _ending: bool = False
    _server: AuthenticatedServer | None = None

    async def open(self, addresses: Iterable[str], folder: str) -> None:
        """Begin to listen, and set `variables`.

        addresses: of this host, as other hosts reach it; () if all ranks are on this host.
        folder: the job's; no other user can open it.
        """
        secret, processes = secrets.token_hex(32), 2 * self.ranks.size
        self._server = AuthenticatedServer(secret.encode(), wire.PURPOSE, self._serve, processes)
        addresses = tuple(addresses)
        if addresses:
            self.restore_files = raise_file_limit(processes + max(HANDSHAKES, processes))
            port = self._server.listen_tcp(addresses)
            self.variables = {"HVDKIT_CONTROL": f"tcp:{port}:{','.join(addresses)}", "HVDKIT_CONTROL_SECRET": secret}
        else:
            file = os.open(os.path.join(folder, wire.SECRET), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as target:
                target.write(secret)
            path = os.path.join(folder, wire.CONTROL)
            self._server.listen_unix(path)
            self.variables = {"HVDKIT_CONTROL": f"unix:{path}"}
        self._server.start()

    async def close(self) -> None:
        """Stop listening and close all connections; an agent that is still connected ends its rank."""
        self._ending = True
        if self._server is not None:
            await self._server.close()
        if self.restore_files is not None:
            self.restore_files()

    def release(self, orders: Mapping[int, Mapping[str, Any]]) -> None:
        """Let the ranks start their commands. orders: by rank."""
        for rank, each in orders.items():
            self.orders[rank] = each
            self.send(rank, wire.GO, json.dumps(each).encode())

    def stop(self) -> None:
        """Make every agent end its rank, and accept no further agents."""
        self._ending = True
        for rank in self.connected:
            self.send(rank, wire.STOP)

    def send(self, rank: int, kind: bytes, payload: bytes = b"") -> None:
        """Send one frame to the agent of a rank, if it is connected."""
        channel = self.connected.get(rank)
        if channel is not None:
            channel.send(kind, payload)

    def send_all(self, kind: bytes, payload: bytes = b"") -> list[int]:
        """Send one frame to every agent; return their ranks."""
        for rank in self.connected:
            self.send(rank, kind, payload)
        return sorted(self.connected)

    async def take_stacks(self) -> dict[int, Any]:
        """Collect the stacks of each rank's processes; None for a rank whose agent does not answer."""
        self._queries += 1
        query, answers = self._queries, self._stacks.setdefault(self._queries, {})
        asked = self.send_all(wire.ASK, str(query).encode())
        await self._answered.wait_until(lambda: len(answers) == len(asked), _STACKS_S)
        del self._stacks[query]
        return {rank: answers.get(rank) for rank in asked}

    async def _serve(self, channel: Channel) -> None:
        rank = None
        try:
            async with time_limit(_FIRST_FRAME_S):
                kind, payload = await channel.read()
            if kind == wire.HEARTBEAT:
                await self._watch_heartbeat(channel)
                return
            rank = self._register(kind, payload, channel)
            while rank is not None:
                self._dispatch(rank, *await channel.read())
        except AuthenticationError as error:
            if rank is not None:
                self.ranks.mark_tampered(rank, str(error))
        except (OSError, EOFError, ValueError, struct.error, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # not an agent, or disconnected, or the job ends: a rank without a report of its end is lost
        finally:
            if rank is not None:
                del self.connected[rank]
                self.ranks.lose(rank)
                self.changed.set()

    async def _watch_heartbeat(self, channel: Channel) -> None:
        """Close the connection of a rank whose host does not answer; an agent that ends reports that itself."""
        try:
            await channel.read()
        except EOFError:
            pass
        except OSError as error:
            if isinstance(error, AuthenticationError):
                self.ranks.mark_tampered(channel.rank, str(error))
            elif not isinstance(error, ConnectionError):
                self.ranks.mark_unreachable(channel.rank)
            connected = self.connected.get(channel.rank)
            if connected is not None:
                connected.abort()

    def _register(self, kind: bytes, payload: bytes, channel: Channel) -> int | None:
        if kind != wire.HELLO or self._ending:
            return None
        arrival = parse_registration(parse_report(payload))
        problem = check_registration(arrival, self.ranks.size, self.ranks.hosts)
        if arrival.rank != channel.rank or (arrival.joins and not self.elastic):
            return None
        if problem:
            self.problem = self.problem or problem
            self.changed.set()
            return None
        self.connected[arrival.rank] = channel
        self.arrivals[arrival.rank] = arrival
        self.ranks.register(arrival.rank, arrival.host, replaces=arrival.joins)
        self.changed.set()
        return arrival.rank

    def _dispatch(self, rank: int, kind: bytes, payload: bytes) -> None:
        if kind in (wire.STDOUT, wire.STDERR):
            self.on_output(rank, kind == wire.STDERR, payload)
        elif kind == wire.START:
            self.ranks.start(rank, parse_start(payload))
            self.changed.set()
        elif kind == wire.STDIN:
            if self.stdin is not None:
                self.stdin.request(functools.partial(self.send, rank, wire.STDIN))
            else:
                self.send(rank, wire.STDIN)
        elif kind == wire.STACKS:
            query, processes = parse_stacks(payload)
            if query in self._stacks:
                self._stacks[query][rank] = processes
                self._answered.set()
        elif kind == wire.EVENT:
            self.ranks.hear(rank, payload.decode(errors="replace").split())
            self.changed.set()
        elif kind == wire.PAUSE:
            self.ranks.pause(rank, int(payload))
            self.changed.set()
        elif kind == wire.END:
            self.ranks.end(rank, parse_end(payload))
            if self._ending:
                self.send(rank, wire.BYE)
            self.changed.set()
