"""The launcher's own daemon on this host, once hvdrun and mpirun cannot be reached any more.

mpirun's daemons notice a cut connection after many minutes, or never, and would stay behind on a host that was cut off.
But where the other ranks go on, and the way there is open again some time, the end of a daemon would end their job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from .silence import make_patient
from .wire import look_for_hvdrun

# As /proc/PID/comm has them, with room for 15 letters.
_NAMES = ("prted", "orted", "hydra_pmi_proxy", "pmi_proxy")
_OTHERS_S, _TERM_S = 5.0, 1.0
_LOOK_S, _LONGEST_S = 1.0, 900.0


def await_hvdrun(where: str, secret: str) -> bool:
    """Wait, with the daemon, until it is known whether hvdrun is there; for 15 minutes, if the daemon can be made to.

    where, secret: as for open_control.
    """
    daemon = os.getppid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which the daemon may want to end this process
    make_patient(daemon)  # where that is not allowed it ends by itself, after 8 minutes
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline and _read_name(daemon) in _NAMES and os.getppid() == daemon:
        answer = look_for_hvdrun(where, secret)
        if answer is not None:
            return answer
        time.sleep(_LOOK_S)
    return False


def end_daemon() -> None:
    """End the daemon that started this process, after the other ranks that it started have ended."""
    daemon = os.getppid()
    if _read_name(daemon) not in _NAMES:
        return
    for number, patience in ((None, _OTHERS_S), (signal.SIGTERM, _TERM_S), (signal.SIGKILL, 0.0)):
        if number is not None:
            with contextlib.suppress(OSError):
                os.kill(daemon, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if os.getppid() != daemon:
                return
            if number is None and not _read_children(daemon) - {os.getpid()}:
                break
            time.sleep(0.05)


def _read_name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def _read_children(pid: int) -> set[int]:
    """List a process's children, those of all its threads."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found
