"""Keep the launcher of an elastic job running when a host is cut off.

Open MPI's mpirun ends the job when the connection to a daemon of its own, or the ssh that started it, fails; a daemon
ends its ranks when it loses mpirun. TCP reports that after minutes of silence, long after the other ranks have
continued. So hvdkit disables the time limits of these connections, and the agent on a host that was cut off keeps or
ends the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time

from .session_reaper import list_session, read_process
from .wire import probe_hvdrun

# pidfd_getfd(2), Linux 5.6 and later: the same number on every architecture.
_PIDFD_GETFD = 438
_NEVER_MS = 2**31 - 1  # 24 days
# Names in /proc/PID/comm, which has 15 letters at most.
_NAMES = ("prted", "orted", "hydra_pmi_proxy", "pmi_proxy")
_OTHERS_S, _TERM_S = 5.0, 1.0
_LOOK_S, _LONGEST_S = 1.0, 900.0


def disable_session_timeouts(session: int) -> str:
    """Disable TCP timeouts on all connections of a session's processes.

    A connection that the peer closes is still detected. Returns the reason if this is not possible; else "".
    """
    problems = [disable_timeouts(process) for process in list_session(session)]
    return next(filter(None, problems), "")


def disable_timeouts(process: int) -> str:
    """Disable TCP timeouts on all connections of a process; returns the reason if this is not possible, else ""."""
    try:
        _set_no_timeout(process)
    except (OSError, AttributeError) as error:  # the system is too old, or does not permit it
        return str(error)
    return ""


def _set_no_timeout(process: int) -> None:
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


def wait_for_hvdrun(where: str, secret: str) -> bool:
    """Wait until it is known whether hvdrun is running, for 15 minutes at most; keeps the daemon waiting, if possible.

    where, secret: as for connect_to_hvdrun.
    """
    daemon = os.getppid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the daemon may end this process by SIGTERM
    disable_timeouts(daemon)  # if that is not permitted, the daemon ends by itself after 8 minutes
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline and _is_daemon(daemon) and os.getppid() == daemon:
        answer = probe_hvdrun(where, secret)
        if answer is not None:
            return answer
        time.sleep(_LOOK_S)
    return False


def end_daemon() -> None:
    """End the daemon that started this process, after its other ranks have ended."""
    daemon = os.getppid()
    if not _is_daemon(daemon):
        return
    for number, pause_s in ((None, _OTHERS_S), (signal.SIGTERM, _TERM_S), (signal.SIGKILL, 0.0)):
        if number is not None:
            with contextlib.suppress(OSError):
                os.kill(daemon, number)
        deadline = time.monotonic() + pause_s
        while time.monotonic() < deadline:
            if os.getppid() != daemon:
                return
            if number is None and not _read_children(daemon) - {os.getpid()}:
                break
            time.sleep(0.05)


def _is_daemon(pid: int) -> bool:
    return read_process(pid, "comm").strip() in _NAMES


def _read_children(pid: int) -> set[int]:
    """List the children of a process, from all its threads."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found
