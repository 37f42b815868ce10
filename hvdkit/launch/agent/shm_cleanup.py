"""Remove shared memory of killed ranks from /dev/shm, where it uses memory until the host restarts.

Open MPI names it sm_segment.HOST.UID.JOB.RANK (Open MPI 4: vader_segment), and removes it when a rank ends by itself.
hvdkit's name is hvdkit-PID-RANDOM until all ranks of the host have opened it; the process that made it holds a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Iterator

#: The number of the first namespace of processes: /proc shows every process of the host there, and nowhere else.
_ALL_PROCESSES = "pid:[4026531836]"
_OWN = re.compile(r"hvdkit-([0-9]+)-[0-9a-f]+")


def remove_abandoned_files(folder: str = "/dev/shm") -> list[str]:
    """Remove this user's files of hvdkit whose maker has ended and whose lock is free; returns their names."""
    removed = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            match = _OWN.fullmatch(name)
            if match is not None and not os.path.exists(f"/proc/{match[1]}"):
                with contextlib.suppress(OSError):  # another user's, locked, or removed by another agent
                    _remove_unlocked(os.path.join(folder, name))
                    removed.append(name)
    return removed


def _remove_unlocked(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(descriptor)


def remove_dead_segments(folder: str = "/dev/shm") -> list[str]:
    """Remove the segments of this user on this host that no process has mapped or open; returns their names.

    A process has its segment mapped as long as it runs. Nothing is removed if mappings cannot be read: in a container
    with processes of its own, or if a process of this user has shared memory and does not show its files.
    """
    found = set(_list_segments(folder))  # listed before the processes, so that later segments are not among them
    if not found:
        return []
    try:
        if os.readlink("/proc/self/ns/pid") != _ALL_PROCESSES:
            return []
        processes = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]  # 1 is the system's
        used = {name for process in processes for name in list_open_files(process)}
    except OSError:
        return []
    dead = sorted(found - used)
    for name in dead:
        with contextlib.suppress(FileNotFoundError):  # the agent of another rank removed it first
            os.unlink(os.path.join(folder, name))
    return dead


def _list_segments(folder: str) -> Iterator[str]:
    """Name each segment that this user has made on this host."""
    user, host = os.geteuid(), socket.gethostname()
    hosts = "|".join(map(re.escape, {host, host.partition(".")[0]}))
    pattern = re.compile(rf"(sm|vader)_segment\.({hosts})\.{user}\.[0-9a-f]+\.[0-9]+")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == user:
                        yield entry.name


def list_open_files(process: str) -> set[str]:
    """Name the files, without folders, that a process of this user has mapped or open.

    Empty for other users' processes and for an ended process. Raises PermissionError for a process of this user that
    has shared memory and does not show its files. Some processes without shared memory do not show them either:
    zombies, sshd's of a login, ssh-agent.
    """
    folder = f"/proc/{process}"
    try:
        with open(f"{folder}/status", encoding="utf-8", errors="replace") as file:
            status = {name: value.split() for name, _, value in (line.partition(":") for line in file)}
        if str(os.geteuid()) not in status.get("Uid", []):
            return set()
        found = set()
        try:
            for name in os.listdir(f"{folder}/fd"):  # read before the maps: a file is mapped first, and then closed
                with contextlib.suppress(FileNotFoundError):
                    found.add(os.path.basename(os.readlink(f"{folder}/fd/{name}")))
            with open(f"{folder}/maps", encoding="utf-8", errors="replace") as file:
                found.update(os.path.basename(line.rstrip("\n")) for line in file)
        except PermissionError:
            if "VmSize" in status and status.get("RssShmem", ["?"])[0] != "0":  # a zombie has no memory
                raise
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return found
