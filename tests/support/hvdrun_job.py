"""hvdrun in a process of its own, from a test, and what it has started."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HVDRUN = [sys.executable, "-m", "hvdkit.launch"]
ROOT = Path(__file__).parents[2]
RANK = "import os, sys, time, signal; rank = int(os.environ['OMPI_COMM_WORLD_RANK'] if 'OMPI_COMM_WORLD_RANK' in os.environ else os.environ['PMI_RANK'])\n"  # noqa: E501


def command(ranks: int, script: str, *options: str) -> list[str]:
    return [*HVDRUN, "-np", str(ranks), *options, sys.executable, "-c", RANK + script]


def environment() -> dict[str, str]:
    names = (name for name in os.environ if not re.match(r"HVDKIT_|OMPI_COMM|PMIX_|PMI_|PRTE_", name))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**{name: os.environ[name] for name in names}, "PYTHONPATH": path}


def hvdrun(ranks: int, script: str, *options: str, cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(ranks, script, *options),
        env=environment(),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=100,
        check=False,
    )


@contextlib.contextmanager
def started(ranks: int, script: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command(ranks, script, *options),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_pids(process: subprocess.Popen[bytes], ranks: int) -> dict[int, int]:
    """Read "[rank] pid N" from each rank."""
    assert process.stdout is not None
    pids: dict[int, int] = {}
    while len(pids) < ranks:
        found = re.match(rb"\[(\d+)\] pid (\d+)", process.stdout.readline())
        assert found, process.communicate()
        pids[int(found[1])] = int(found[2])
    return pids


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, todo = set(), [pid]
    while todo:
        new = children.get(todo.pop(), [])
        found.update(new)
        todo += new
    return found


def wait_until(true: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def lines(data: bytes) -> list[str]:
    return data.decode().splitlines()


SLEEP = "print('pid', os.getpid(), flush=True); time.sleep(60)"
