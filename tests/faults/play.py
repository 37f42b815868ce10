"""A plan, carried out: the job goes on through all of it, or what is wrong is said."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic_world_script import reference
from hvdrun_job import HVDRUN, alive, environment

from faults.plan import KINDS, Fault, Plan

SCRIPT = Path(__file__).parents[1] / "elastic_world_script.py"
_STOP_S, _WAIT_S = 5.0, 40.0
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "error": signal.SIGUSR2, "sleep": signal.SIGUSR1}


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
def started(*options: str, command: tuple[str, ...]) -> Iterator[Job]:
    """A job of hvdrun's; nothing of it is left at the end."""
    process = subprocess.Popen(
        [*HVDRUN, "--elastic", *options, sys.executable, *command],
        env=environment(),
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


def play(plan: Plan) -> None:
    """Carry out a plan. Raises AssertionError, with all that the job has said, if it does not end as it should."""
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        finish = Path(folder, "finish")
        command = (str(SCRIPT), "1000000", "0.01", str(plan.commit_every), str(finish))
        with started("-np", str(plan.ranks), "--min-np", "1", command=command) as job:
            job.wait_for(lambda: len(job.pids) == plan.ranks and job.committed(plan.commit_every))
            for fault in plan.faults:
                time.sleep(fault.after_s)
                if "StateLostError" not in job.output:
                    _inflict(job, fault)
            finish.touch()
            output = job.end()
        if job.process.returncode == 1 and "StateLostError" in output:
            return  # the last one that had the state died before the others were given it: a clear end
        assert job.process.returncode == 0, f"{plan}\n{output}"
        result = job.result()
        assert result["alike"], f"{plan}\n{output}"
        off = [abs(mine - wanted) for mine, wanted in zip(result["summary"], reference(result["step"]), strict=True)]
        assert max(off) < 1e-9, f"{plan}\n{off}\n{output}"
    assert shared_memory() <= before, f"{plan}: left in /dev/shm"


def _inflict(job: Job, fault: Fault) -> None:
    """Let it happen to one of the ranks that are there; one that is to end is not the last one that trains."""
    job.wait_for(lambda: len(job.there) > 1)
    there = job.there
    victim = there[int(fault.victim * len(there))]
    with contextlib.suppress(ProcessLookupError):
        if fault.kind == "stop":
            os.kill(victim, signal.SIGSTOP)
            time.sleep(_STOP_S)
            os.kill(victim, signal.SIGCONT)
        else:
            os.kill(victim, _SIGNALS[fault.kind])
    if KINDS[fault.kind]:
        job.wait_for(lambda: not alive(victim))


def shared_memory() -> set[str]:
    """What hvdkit has in /dev/shm."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("hvdkit-")}
