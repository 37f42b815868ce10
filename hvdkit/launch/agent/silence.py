"""Connections that outlast silence: the launcher is not to notice that a host is gone, as it would end the job.

Open MPI's mpirun ends everything when it loses one of its daemons, or the ssh that it has started one with, and so does
a daemon that has lost mpirun. By themselves they notice after minutes of silence, long after other ranks have gone on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket

from .guard import find_members

# pidfd_getfd(2), Linux 5.6 and later: the same number on every architecture.
_PIDFD_GETFD = 438
_NEVER_MS = 2**31 - 1  # 24 days


def outlast_silence(session: int) -> str:
    """Have no TCP connection of a session's processes fail because nothing comes from the other side.

    Returns why that cannot be done; "" if it is done. An end of the connection that is told is still heard.
    """
    problems = [make_patient(process) for process in find_members(session)]
    return next(filter(None, problems), "")


def make_patient(process: int) -> str:
    """The same for one process."""
    try:
        _make_patient(process)
    except (OSError, AttributeError) as error:  # too old a system, or one that does not let us
        return str(error)
    return ""


def _make_patient(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        handle = os.pidfd_open(process)
        try:
            for number in _list_sockets(process):
                with socket.socket(fileno=_take(handle, number)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
                        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _NEVER_MS)
        finally:
            os.close(handle)


def _list_sockets(process: int) -> list[int]:
    found, folder = [], f"/proc/{process}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(f"{folder}/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def _take(handle: int, number: int) -> int:
    """Take a descriptor of another process, like dup()."""
    libc = ctypes.CDLL(None, use_errno=True)
    taken = int(libc.syscall(_PIDFD_GETFD, handle, number, 0))
    if taken < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return taken
