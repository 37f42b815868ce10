"""Queries to a running hvdrun by other commands of the same user, over a Unix socket in the folder of the job.

A query is a line of JSON, and so is the answer: {"ask": "job"}, {"ask": "stacks"}, or {"ask": "stop", "now": false}.
After a stop a second line follows when the job has ended: {"code": 143}.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.agent import wire
from hvdkit.launch.state.accept_loop import AcceptLoop
from hvdkit.launch.state.control import parse_report
from hvdkit.launch.state.waiting import ChangeEvent

_ANSWER_S = 4.0
_LONGEST = 1 << 16
_MOST = 32  # connections without a query yet
_BACKLOG = 128


class QueryServer:
    """Answers queries.

    describe: describes the job. take_stacks: see ControlServer.take_stacks().
    """

    def __init__(
        self, describe: Callable[[], Mapping[str, Any]], take_stacks: Callable[[], Awaitable[Mapping[int, Any]]]
    ) -> None:
        self._describe, self._take_stacks = describe, take_stacks
        self._accept_loop = AcceptLoop(self._serve, _MOST, _BACKLOG, limit=_LONGEST)
        self._ended = asyncio.Event()
        self._code = 0
        self._answered = ChangeEvent()
        self._waiting: set[asyncio.StreamWriter] = set()  # connections that wait for the exit code

    async def open(self, folder: str) -> None:
        """Begin to listen."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.path.join(folder, wire.QUERY))
        self._accept_loop.listen([listener])
        self._accept_loop.start()

    def close(self) -> None:
        """Stop listening; connections that wait for the exit code stay."""
        self._accept_loop.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            query = parse_report(await asyncio.wait_for(reader.readline(), _ANSWER_S))
            self._accept_loop.prove()
            answer: dict[str, Any] = {"job": self._describe()}
            if query.get("ask") == "stacks":
                answer["ranks"] = await self._take_stacks()
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
            if query.get("ask") == "stop":
                await self._stop(writer, signal.SIGINT if query.get("now") else signal.SIGTERM)
        except (OSError, ValueError, asyncio.TimeoutError):
            pass  # the client is not a command of hvdkit, or has disconnected
        finally:
            self._waiting.discard(writer)
            self._answered.set()

    async def _stop(self, writer: asyncio.StreamWriter, number: signal.Signals) -> None:
        self._waiting.add(writer)
        if not self._ended.is_set():
            signal.raise_signal(number)  # Interruption handles it, since before this server was opened
        await self._ended.wait()
        writer.write(json.dumps({"code": self._code}).encode() + b"\n")
        await writer.drain()

    async def report_end(self, code: int) -> None:
        """Send the exit code of the job to the commands that wait for it."""
        self._code = code
        self._ended.set()
        await self._answered.wait_until(lambda: not self._waiting, _ANSWER_S)


def query_job(folder: str, query: str) -> dict[str, Any]:
    """Send a query to the job in this folder; returns its answer. Raises LaunchError if it does not answer."""
    with _connect(folder, {"ask": query}) as (_, lines):
        return parse_report(lines.readline())


def stop_job(folder: str, *, now: bool) -> int | None:
    """Request the job in this folder to end, and wait for its end; returns its exit code, None if hvdrun died before.

    now: end without time to save. Raises LaunchError if hvdrun does not answer.
    """
    with _connect(folder, {"ask": "stop", "now": now}) as (connection, lines):
        parse_report(lines.readline())
        connection.settimeout(None)
        last = lines.readline()
        return int(parse_report(last)["code"]) if last else None


@contextlib.contextmanager
def _connect(folder: str, query: Mapping[str, Any]) -> Iterator[tuple[socket.socket, io.BufferedReader]]:
    """Send a query; yields the connection and the lines of the answer. Raises LaunchError if hvdrun does not answer."""
    path = os.path.join(folder, wire.QUERY)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2 * _ANSWER_S)
            connection.connect(path)
            connection.sendall(json.dumps(query).encode() + b"\n")
            with connection.makefile("rb") as lines:
                yield connection, lines
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"hvdrun does not answer at {path}: {error}. Check that its process is running and not stopped.",
            code="job-does-not-answer",
        ) from None
