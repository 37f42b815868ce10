"""Open MPI's shared memory of killed ranks is removed, and never that of a live one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hvdrun_job import alive, descendants, hvdrun, started, wait_until

from hvdkit.launch.agent import segments
from hvdkit.launch.agent.segments import remove_dead_segments

ALL_VISIBLE = os.readlink("/proc/self/ns/pid") == segments._ALL_PROCESSES
needs_all_processes = pytest.mark.skipif(not ALL_VISIBLE, reason="this is a container with processes of its own")
HOLD = "import mmap, sys; file = open(sys.argv[1], 'r+b'); kept = mmap.mmap(file.fileno(), 0); "


def segment(folder: Path, kind: str = "sm", host: str = "", user: int | None = None, rank: int = 0) -> Path:
    user = os.geteuid() if user is None else user
    path = folder / f"{kind}_segment.{host or socket.gethostname()}.{user}.6a870001.{rank}"
    path.write_bytes(bytes(4096))
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where Open MPI has its own: other file systems may show a mapped file under another device."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_ALL_PROCESSES", os.readlink("/proc/self/ns/pid"))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("kept", ["mapped", "open"])
def test_what_no_process_has_is_removed_and_the_rest_stays(kept: str, folder: Path) -> None:
    dead = [segment(folder), segment(folder, "vader")]
    alive = segment(folder, rank=1)
    others = [
        segment(folder, host="another"),
        segment(folder, user=os.geteuid() + 1),
        folder / "sm_segment.txt",
        folder / "data",
    ]
    for path in others[2:]:
        path.touch()
    script = HOLD + ("file.close(); " if kept == "mapped" else "kept.close(); ") + "print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(alive)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert sorted(remove_dead_segments(str(folder))) == sorted(path.name for path in dead)
        assert sorted(folder.iterdir()) == sorted([alive, *others])
        process.kill()
    assert remove_dead_segments(str(folder)) == [alive.name]


def test_nothing_is_removed_where_processes_may_be_hidden(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = segment(folder)
    monkeypatch.setattr(segments, "_ALL_PROCESSES", "pid:[1]")
    assert remove_dead_segments(str(folder)) == []
    monkeypatch.setattr(segments, "_ALL_PROCESSES", os.readlink("/proc/self/ns/pid"))

    def hidden(process: str) -> set[segments.File]:
        raise PermissionError

    monkeypatch.setattr(segments, "_files_of", hidden)
    assert remove_dead_segments(str(folder)) == []
    assert path.exists()


@needs_all_processes
@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_a_job_leaves_no_segment_of_a_killed_one() -> None:
    script = (
        "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()\n"
        "maps = open('/proc/self/maps').read()\n"
        "import re; print(rank, os.getpid(), *sorted(set(re.findall(r'/dev/shm/sm_segment\\S*', maps))), flush=True)\n"
        "time.sleep(60)"
    )
    with started(2, script) as process:
        assert process.stdout is not None
        words = [process.stdout.readline().decode().split() for _ in range(2)]
        names = {name for line in words for name in line[3:]}
        if not names:
            pytest.skip("no GPU is not why: this MPI has no segments of this name")
        assert all(re.search(r"\.[0-9a-f]+\.[01]$", name) for name in names)
        assert hvdrun(1, "print('beside it')").returncode == 0
        assert all(map(os.path.exists, names)), "the ranks live"
        everything = [*descendants(process.pid), process.pid]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none of them sees another end, and cleans up
            for pid in everything:
                os.kill(pid, number)
        process.wait(20)
        assert wait_until(lambda: not any(map(alive, everything)), 10)
    assert all(map(os.path.exists, names)), "nobody was left to remove them"
    hvdrun(1, "print('the next job')")
    assert not any(map(os.path.exists, names))
