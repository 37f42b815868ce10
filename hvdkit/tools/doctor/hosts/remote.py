"""One agent: started, asked, ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from hvdkit.tools.doctor.hosts.seen import Failure

_KEPT_LINES = 40


class Gone(Exception):
    """There is no agent, or not any more. failure: why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.said)
        self.failure = failure


class Remote:
    """An agent, and what starts it (ssh, say)."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._said: list[str] = []
        try:
            self._process = subprocess.Popen(
                argv,
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise Gone(Failure(127, str(error))) from None
        assert self._process.stdout and self._process.stderr
        self._readers = [
            threading.Thread(target=self._read_answers, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def greet(self, timeout_s: float) -> None:
        """Wait until the agent is there; raises Gone if it does not come."""
        while "hello" not in self._read(timeout_s):
            pass  # what a shell's start-up files print

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> Any:
        """Ask and wait for the answer; raises Gone if there is none."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise Gone(self._fail()) from None
        reply = self._read(timeout_s)
        if "error" in reply:
            raise Gone(Failure(0, f"its agent could not {do}: {reply['error']}"))
        return reply.get("answer")

    def close(self) -> None:
        """End the agent; it ends by itself when its input does."""
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._kill()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        while True:
            try:
                line = self._answers.get(timeout=timeout_s)
            except queue.Empty:
                self._kill()
                raise Gone(Failure(None, "".join(self._said))) from None
            if line is None:
                raise Gone(self._fail())
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
            self._said.append(line)

    def _fail(self) -> Failure:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._readers[1].join(1)
        self._kill()
        return Failure(self._process.poll(), "".join(self._said))

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read_answers(self, stream: IO[str]) -> None:
        for line in stream:
            self._answers.put(line)
        self._answers.put(None)

    def _read_errors(self, stream: IO[str]) -> None:
        for line in stream:
            self._said.append(line)
            del self._said[:-_KEPT_LINES]
