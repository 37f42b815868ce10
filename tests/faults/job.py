"""An elastic job of hvdrun's in a process of its own, and its ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdrun_job import HVDRUN, alive, environment

_WAIT_S = 40.0


class Job:
    """An elastic job that runs. pids: of the ranks that have begun to train, by number. lines: all that it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[str]()
        self.pids: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.match(r"\[(\d+)\] pid (\d+)", line):
                self.pids[int(found[1])] = int(found[2])

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def there(self) -> list[int]:
        """The processes of the ranks that have not ended."""
        return [pid for pid in list(self.pids.values()) if alive(pid)]

    def wait_for(self, true: Callable[[], Any], seconds: float = _WAIT_S) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def committed(self, step: int) -> bool:
        return any(int(one) >= step for one in re.findall(r"committed (\d+)", self.output))

    def end(self) -> str:
        self.process.wait(60)
        self._reader.join(10)
        return self.output

    def result(self) -> Any:
        return json.loads(next(line for line in self.lines if '"summary"' in line).partition("] ")[2])


@contextmanager
def started(*options: str, command: tuple[str, ...], cwd: Path | None = None) -> Iterator[Job]:
    """A job of hvdrun's; nothing of it is left at the end."""
    process = subprocess.Popen(
        [*HVDRUN, "--elastic", *options, sys.executable, *command],
        env=environment(),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        job = Job(process)
        yield job
    finally:
        process.kill()
        process.wait()
    assert not job.there, f"left: {job.there}\n{job.output}"
