"""End a session of processes and remove its folder, also when the process that started it is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence

Steps = Sequence[tuple[signal.Signals, float]]

_DONE = b"done"


class SessionReaper:
    """A small process beside this process, which continues when this process is killed.

    steps: see end_session. folder: removed after the session has ended; "" for none. lock: a descriptor that stays open
    until then; -1 for none.
    """

    def __init__(self, steps: Steps = (), folder: str = "", lock: int = -1) -> None:
        source, self._target = os.pipe()  # later child processes do not inherit it
        self._pid = os.fork()
        if self._pid == 0:
            _reap(source, steps, folder, lock)
        os.close(source)

    def watch(self, session: int) -> None:
        """Set the session to end: its leader's number."""
        os.write(self._target, f"{session}\n".encode())

    def dismiss(self) -> None:
        """End the reaper; to be called before the session's leader is reaped."""
        with contextlib.suppress(OSError):
            os.write(self._target, _DONE)
        os.close(self._target)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def end_session(session: int, steps: Steps = ()) -> None:
    """End all processes of a session.

    steps: signals for its leader and the leader's group, each with the seconds to wait for their end; the remaining
    processes are then killed.
    """
    for number, pause_s in steps:
        if not list_session(session):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, number)
        deadline = time.monotonic() + pause_s
        while time.monotonic() < deadline and list_session(session):
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)  # one call for all, so that no process of the group starts another meanwhile
    for pid in list_session(session):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _reap(source: int, steps: Steps, folder: str, lock: int) -> None:
    """Run the reaper's process: end the session if the other process ends without dismiss()."""
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        # Otherwise readers of the pipes that this process has open would wait for its end too.
        os.dup2(source, 0)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                os.close(-1 if int(name) in (0, lock) else int(name))
        report = b""
        while data := os.read(0, 4096):
            report += data
        session = report.partition(b"\n")[0]
        if session.isdigit() and not report.endswith(_DONE):
            end_session(int(session), steps)
            if folder:
                import shutil  # slow to import, and agents start in milliseconds

                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Make a function for a child process that makes Linux send it a signal when its parent ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(1, int(number), 0, 0, 0)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return ask


def catches(process: int, number: signal.Signals) -> bool:
    """Does a process have a handler for a signal? False if this is unknown."""
    _, found, rest = read_process(process, "status").partition("\nSigCgt:")
    return bool(found) and bool(int(rest.split()[0], 16) >> (number - 1) & 1)


def read_process(process: int, name: str) -> str:
    """Read a file of /proc/PID, as "comm"; "" if the process has ended, or does not show it."""
    try:
        with open(f"/proc/{process}/{name}", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def list_session(session: int) -> list[int]:
    """List the processes of a session that have not ended."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            state, *_, its_session = read_process(int(name), "stat").rpartition(")")[2].split()[:4] or ("X", "0")
            if int(its_session) == session and state not in "ZX":
                found.append(int(name))
    return found
