"""Open MPI's shared memory that killed ranks have left in /dev/shm: it counts as memory that is in use until a restart.

Open MPI names it sm_segment.HOST.UID.JOB.RANK (Open MPI 4: vader_segment), and removes it when a rank ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator

#: What tells a file from all others: major and minor number of its device, inode.
File = tuple[int, int, int]
#: The number of the first namespace of processes: /proc shows every process of the host there, and nowhere else.
_ALL_PROCESSES = "pid:[4026531836]"


def remove_dead_segments(folder: str = "/dev/shm") -> list[str]:
    """Remove the segments of this user on this host that no process has mapped or open; returns their names.

    Whoever made a segment has it mapped as long as it lives. Nothing is removed where that cannot be seen: in a
    container with processes of its own, or if a process of this user does not let itself be looked at.
    """
    found = dict(_list_segments(folder))  # before the processes: one that is made later is not in it
    if not found:
        return []
    try:
        if os.readlink("/proc/self/ns/pid") != _ALL_PROCESSES:
            return []
        processes = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]  # 1 is the system's own
        used = {file for process in processes for file in _files_of(process)}
    except OSError:
        return []
    dead = [name for name, file in found.items() if file not in used]
    for name in dead:
        with contextlib.suppress(FileNotFoundError):  # the agent of another rank was first
            os.unlink(os.path.join(folder, name))
    return dead


def _list_segments(folder: str) -> Iterator[tuple[str, File]]:
    """Name and file of each segment that this user has made on this host."""
    user, host = os.geteuid(), socket.gethostname()
    hosts = "|".join(map(re.escape, {host, host.partition(".")[0]}))
    pattern = re.compile(rf"(sm|vader)_segment\.({hosts})\.{user}\.[0-9a-f]+\.[0-9]+")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == user:
                        yield entry.name, _identify(status)


def _identify(status: os.stat_result) -> File:
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino


def _files_of(process: str) -> set[File]:
    """The files that a process of this user has mapped or open; none for others' and for one that has ended.

    Raises PermissionError if a process of this user cannot be looked at.
    """
    folder = f"/proc/{process}"
    try:
        with open(f"{folder}/status", encoding="utf-8", errors="replace") as file:
            users = next((line.split()[1:] for line in file if line.startswith("Uid:")), [])
        if str(os.geteuid()) not in users:
            return set()
        with open(f"{folder}/maps", encoding="utf-8", errors="replace") as file:
            found = set(map(_read_mapping, file))
        for name in os.listdir(f"{folder}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add(_identify(os.stat(f"{folder}/fd/{name}")))
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return found


def _read_mapping(line: str) -> File:
    device, inode = line.split(maxsplit=5)[3:5]
    major, minor = device.split(":")
    return int(major, 16), int(minor, 16), int(inode)
