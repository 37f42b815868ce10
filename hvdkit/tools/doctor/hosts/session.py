"""The session with the agent of one host: JSON lines over the standard streams of ssh or srun.

ssh encrypts them and needs no other open port: doctor has to work where connections between the hosts do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.tools.doctor.survey import Failure

_LAST_LINES = 40
_LONGEST_LINE_BYTES = 16 << 20
_END_S = 2.0


class AgentLost(Exception):
    """The agent did not start, or has ended. failure: why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.said)
        self.failure = failure


class AgentSession:
    """An agent, and the process that starts it. To be started first; close() ends both."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._messages: list[str] = []
        self._errors: asyncio.Task[None] | None = None

    async def start(self, argv: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> None:
        """Start an agent and wait until it answers; raises AgentLost."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                env=dict(environ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=_LONGEST_LINE_BYTES,
            )
        except OSError as error:
            raise AgentLost(Failure(127, str(error))) from None
        self._errors = asyncio.create_task(self._read_errors(self._process))
        while "hello" not in await self._read(self._process, timeout_s):
            pass  # output of a shell's start-up files

    async def ask(self, request: str, timeout_s: float, **arguments: Any) -> Any:
        """Send a request and wait for the answer; raises AgentLost."""
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write((json.dumps({"do": request, **arguments}) + "\n").encode())
            await process.stdin.drain()
        except OSError:
            raise AgentLost(await self._fail(process)) from None
        reply = await self._read(process, timeout_s)
        if "error" in reply:
            raise AgentLost(Failure(0, f"the agent's request {request!r} failed: {reply['error']}"))
        return reply.get("answer")

    async def close(self) -> None:
        """End the agent, which ends when its input does, and its process group."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._end(self._process)

    async def _read(self, process: asyncio.subprocess.Process, timeout_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        while True:
            try:
                line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
            except (asyncio.TimeoutError, ValueError):  # ValueError: a line that is too long
                _kill(process)
                raise AgentLost(Failure(None, "".join(self._messages))) from None
            if not line:
                raise AgentLost(await self._fail(process))
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    return message
            self._note(line)

    async def _read_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with contextlib.suppress(ValueError):
            while line := await process.stderr.readline():
                self._note(line)

    def _note(self, line: bytes) -> None:
        self._messages = [*self._messages, line.decode(errors="replace")][-_LAST_LINES:]

    async def _fail(self, process: asyncio.subprocess.Process) -> Failure:
        if self._errors is not None:
            await asyncio.wait([self._errors], timeout=_END_S)
        await self._end(process)
        return Failure(process.returncode, "".join(self._messages))

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), _END_S)
        _kill(process)
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
