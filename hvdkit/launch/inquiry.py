"""What other commands of the same user may ask a running hvdrun, over a Unix socket in its folder.

A question is a line of JSON, and so is the answer: {"ask": "job"} or {"ask": "stacks"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.agent import wire
from hvdkit.launch.reports import parse_doing, parse_report

_ANSWER_S = 4.0  # of agents; each needs less than two seconds
_LONGEST = 1 << 16


class Inquiries:
    """Listens for questions, and passes those that concern the ranks on to their agents.

    describe: says what the job is. ask: sends all agents a question's number, and tells which ranks they are of.
    """

    def __init__(self, describe: Callable[[], Mapping[str, Any]], ask: Callable[[bytes], list[int]]) -> None:
        self._describe, self._ask = describe, ask
        self._server: asyncio.Server | None = None
        self._questions: dict[int, dict[int, Any]] = {}
        self._count = 0
        self._news = asyncio.Event()

    async def open(self, folder: str) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_unix_server(self._serve, os.path.join(folder, wire.INQUIRY), limit=_LONGEST)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def hear(self, rank: int, payload: bytes) -> None:
        """An agent has answered. Raises ValueError for what is no answer."""
        question, processes = parse_doing(payload)
        if question in self._questions:
            self._questions[question][rank] = processes
            self._news.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = parse_report(await asyncio.wait_for(reader.readline(), _ANSWER_S))
            answer: dict[str, Any] = {"job": self._describe()}
            if question.get("ask") == "stacks":
                answer["ranks"] = await self.gather()
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, asyncio.TimeoutError):
            pass  # not one of our commands, or one that went away
        finally:
            writer.close()

    async def gather(self) -> dict[int, Any]:
        """What the processes of each rank do; None for a rank whose agent does not answer."""
        self._count += 1
        number, answers = self._count, self._questions.setdefault(self._count, {})
        asked = self._ask(str(number).encode())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ANSWER_S
        while len(answers) < len(asked) and (left := deadline - loop.time()) > 0:
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)
        del self._questions[number]
        return {rank: answers.get(rank) for rank in asked}


def ask_job(folder: str, question: str) -> dict[str, Any]:
    """Ask the job in this folder; returns its answer. Raises LaunchError if it does not answer."""
    path = os.path.join(folder, wire.INQUIRY)
    data = b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2 * _ANSWER_S)
            connection.connect(path)
            connection.sendall(json.dumps({"ask": question}).encode() + b"\n")
            while piece := connection.recv(1 << 16):
                data += piece
        return parse_report(data)
    except (OSError, ValueError) as error:
        raise LaunchError(f"The hvdrun behind {path} does not answer ({error}). Is it stopped, or ending?") from None
