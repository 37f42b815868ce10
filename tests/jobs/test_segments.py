"""Open MPI's shared memory of killed ranks is removed, and never that of a live one."""

from __future__ import annotations

import fcntl
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

from hvdkit.launch.agent import shm_cleanup
from hvdkit.launch.agent.shm_cleanup import remove_abandoned_files, remove_dead_segments

ALL_VISIBLE = os.readlink("/proc/self/ns/pid") == shm_cleanup._ALL_PROCESSES
needs_all_processes = pytest.mark.skipif(not ALL_VISIBLE, reason="this is a container with processes of its own")
#: Python's own mmap keeps the file open.
OPEN = """
import ctypes, sys
file, libc, size = open(sys.argv[1], "r+b"), ctypes.CDLL(None), ctypes.c_size_t(4096)
libc.mmap.restype = ctypes.c_void_p
"""
MAP = """
at = ctypes.c_void_p(libc.mmap(None, size, 3, 1, file.fileno(), ctypes.c_long(0)))
ctypes.memset(at, 1, 1)
"""
WAIT = "print(flush=True); sys.stdin.readline()\n"


def segment(folder: Path, kind: str = "sm", host: str = "", user: int | None = None, rank: int = 0) -> Path:
    user = os.geteuid() if user is None else user
    path = folder / f"{kind}_segment.{host or socket.gethostname()}.{user}.{os.getpid():x}.{rank}"
    path.write_bytes(bytes(4096))
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where Open MPI has its own: what is mapped from another file system may not count as shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_cleanup, "_ALL_PROCESSES", os.readlink("/proc/self/ns/pid"))


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
    script = OPEN + MAP + ("file.close()\n" if kept == "mapped" else "libc.munmap(at, size)\n") + WAIT
    with subprocess.Popen(
        [sys.executable, "-c", script, str(alive)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert sorted(remove_dead_segments(str(folder))) == sorted(path.name for path in dead)
        assert sorted(folder.iterdir()) == sorted([alive, *others])
        process.kill()
    assert remove_dead_segments(str(folder)) == [alive.name]


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("kind", ["with shared memory", "without", "zombie"])
def test_a_process_that_does_not_show_its_files_counts_if_it_has_shared_memory(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sshd's of a login and ssh-agent, whose files their own user may not see; and as zombies."""
    path = segment(folder)
    script = {
        "with shared memory": OPEN + MAP + WAIT,
        "without": "import sys; " + WAIT,
        "zombie": "",
    }[kind]
    real = os.listdir
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if kind == "zombie":
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        def listdir(name: str) -> list[str]:
            if name == f"/proc/{process.pid}/fd":
                raise PermissionError
            return real(name)

        monkeypatch.setattr(os, "listdir", listdir)
        remove_dead_segments(str(folder))
        assert path.exists() is (kind == "with shared memory")


@pytest.mark.usefixtures("anywhere")
def test_a_segment_that_is_mapped_and_closed_meanwhile_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = segment(folder)
    script = OPEN + WAIT + MAP + "file.close()\n" + WAIT
    real = os.listdir
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None
        stdout.readline()

        def listdir(name: str) -> list[str]:
            if name == f"/proc/{process.pid}/fd":
                stdin.write(b"\n")
                stdin.flush()
                stdout.readline()
            return real(name)

        monkeypatch.setattr(os, "listdir", listdir)
        assert remove_dead_segments(str(folder)) == []
        assert path.exists()


def test_nothing_is_removed_where_processes_may_be_hidden(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = segment(folder)
    monkeypatch.setattr(shm_cleanup, "_ALL_PROCESSES", "pid:[1]")
    assert remove_dead_segments(str(folder)) == []
    monkeypatch.setattr(shm_cleanup, "_ALL_PROCESSES", os.readlink("/proc/self/ns/pid"))

    def hidden(process: str) -> set[str]:
        raise PermissionError

    monkeypatch.setattr(shm_cleanup, "list_open_files", hidden)
    assert remove_dead_segments(str(folder)) == []
    assert path.exists()


@needs_all_processes
@pytest.mark.ranks
@pytest.mark.timeout(120)
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
        assert wait_until(lambda: not any(map(alive, everything)))
    hvdrun(1, "print('the next job')")
    assert not any(map(os.path.exists, names))


@pytest.mark.slow
@needs_all_processes
@pytest.mark.ranks
def test_an_mpirun_that_is_killed_when_all_ranks_have_ended_well_leaves_no_segment(tmp_path: Path) -> None:
    script = (
        "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()\n"
        "import re; print(*sorted(set(re.findall(r'/dev/shm/sm_segment\\S*', open('/proc/self/maps').read()))))\n"
        "def parent(pid): return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
        "os.kill(parent(parent(os.getpid())), signal.SIGSTOP)  # mpirun, which would remove them\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "sys.stdout.flush(); os._exit(0)"
    )
    done = hvdrun(2, script)
    names = {name for line in done.stdout.decode().splitlines() for name in line.split()[1:]}
    assert "every rank ended with exit code 0, but mpirun ended with status 137" in done.stderr.decode()
    assert not any(map(os.path.exists, names))


def test_only_files_whose_maker_has_ended_and_whose_lock_is_free_are_removed(folder: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    names = [f"hvdkit-{ended.pid}-{letter}" for letter in "ab"] + [f"hvdkit-{os.getpid()}-c", "hvdkit-x-d"]
    for name in names:
        (folder / name).touch()
    with (folder / names[1]).open("w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert remove_abandoned_files(str(folder)) == names[:1]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names[1:])
