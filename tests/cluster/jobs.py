"""A job that hvdrun runs from node1 on all hosts of the lab, one rank on each."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.lab import Lab

HVDRUN = (sys.executable, "-m", "hvdkit.launch")
LOOP = str(Path(__file__).with_name("loop.py"))
MEET = str(Path(__file__).with_name("meet.py"))
EVERYWHERE = "node1:1,node2:1,node3:1"


@dataclass
class Job:
    """hvdrun at work. ranks: by rank, its host and its process's number there."""

    process: subprocess.Popen[str]
    ranks: dict[int, tuple[str, int]]

    def end(self, timeout: float) -> tuple[int, str, float]:
        """Wait for the end; returns exit code, what hvdrun said, and how long it took from now."""
        began = time.monotonic()
        try:
            _, errors = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"not ended after {timeout} s: {self.process.communicate()}") from None
        return self.process.returncode, errors, time.monotonic() - began


@contextmanager
def running(
    lab: Lab, *what: str, python: str = sys.executable, env: Mapping[str, str] | None = None, ranks: int = 3
) -> Iterator[Job]:
    """Start loop.py on all hosts, and wait until each rank runs."""
    command = [python, "-m", "hvdkit.launch", "-np", str(ranks), "-H", EVERYWHERE, python, LOOP, *what]
    process = lab.start("node1", command, env=env)
    job = Job(process, {})
    try:
        assert process.stdout is not None
        while len(job.ranks) < ranks:
            line = process.stdout.readline()
            assert line, process.communicate()
            found = re.match(r"\[(\d+) (\S+)\] runs as (\d+)", line)
            if found:
                job.ranks[int(found[1])] = found[2], int(found[3])
        yield job
    finally:
        process.kill()
        process.communicate()


def signal_agent(lab: Lab, job: Job, rank: int, number: signal.Signals) -> None:
    """Send a signal to the agent of a rank, on its host."""
    host, pid = job.ranks[rank]
    assert lab.run(host, ["sh", "-c", f"kill -{int(number)} $(ps -o ppid= -p {pid})"]).returncode == 0


def signal_rank(lab: Lab, job: Job, rank: int, number: signal.Signals) -> None:
    """Send a signal to a rank's process, on its host."""
    host, pid = job.ranks[rank]
    assert lab.run(host, ["kill", f"-{int(number)}", str(pid)]).returncode == 0
