"""An elastic job of hvdrun's in a process of its own, and its ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdrun_job import HVDRUN, alive, environment
from listened import Listened

_WAIT_S = 80.0
_END_S = 150.0  # three ranks, a fourth in place of one, each of which imports TensorFlow, beside other tests


class Job(Listened):
    """An elastic job that runs. pids: of the ranks that have begun to train, by number."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pids: dict[int, int] = {}
        super().__init__(process)

    def hear(self, line: str) -> None:
        if found := re.match(r"\[(\d+)\] pid (\d+)", line):
            self.pids[int(found[1])] = int(found[2])

    @property
    def there(self) -> list[int]:
        """The processes of the ranks that have not ended."""
        return [pid for pid in list(self.pids.values()) if alive(pid)]

    def wait_for(self, true: Callable[[], Any], seconds: float = _WAIT_S, what: str = "what the test needs") -> float:
        """As for all that are listened to, and the job may not end before that."""

        def true_of_a_running_job() -> Any:
            now = true()
            assert now or not self.ended, self.output
            return now

        return super().wait_for(true_of_a_running_job, seconds, what)

    @property
    def last_committed(self) -> int:
        """The step of the newest commit that rank 0 has told of; -1 before."""
        return max(map(int, re.findall(r"committed (\d+)", self.output)), default=-1)

    def committed(self, step: int) -> bool:
        return self.last_committed >= step

    def kill(self, rank: int) -> None:
        """Kill a rank that has said its process, or whose process hvdrun --verbose has."""
        if rank in self.pids:
            os.kill(self.pids[rank], signal.SIGKILL)
        else:
            told = re.findall(rf"rank {rank} on \S+: pid (\d+)", self.output)
            assert told, self.output
            os.kill(int(told[-1]), signal.SIGKILL)

    def end(self) -> str:
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            asked = [sys.executable, "-m", "hvdkit", "stacks", str(self.process.pid)]
            stacks = subprocess.run(asked, env=environment(), capture_output=True, text=True, timeout=60, check=False)
            raise AssertionError(
                f"not ended after {_END_S:g} s\n{self.output}\n{stacks.stdout}{stacks.stderr}"
            ) from None
        self._reader.join(10)
        return self.output


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


def train_and_kill(
    ranks: int, victims: Iterable[int], *options: str, command: tuple[str, ...], committed: int = 10
) -> Job:
    """A job that has ended; the victims were killed when all ranks trained and that step was committed."""
    with started("-np", str(ranks), *options, command=command) as job:
        job.wait_for(lambda: len(job.pids) == ranks and job.committed(committed))
        for victim in victims:
            job.kill(victim)
        job.end()
    return job
