"""What the processes of a rank are doing: the answer to `hvdkit stacks`. See hvdkit/stacks.py for the other side."""

from __future__ import annotations

import contextlib
import os
import re
import time

from .guard import find_members

_NAME = re.compile(r"/memfd:hvdkit-stacks-(\d+)-(\d+)")
_QUIET_S = 0.1  # a dump that has not grown for so long is all there
_PATIENCE_S = 1.5


class _Process:
    """A process that was asked. where: its memory for stacks; "" if it has none."""

    def __init__(self, pid: int, where: str) -> None:
        self.pid, self.where = pid, where
        self.text = b""

    def look(self) -> bool:
        """Take in what has been written; True if that is more than before."""
        with contextlib.suppress(OSError):  # it has ended
            with open(self.where, "rb") as file:
                text = file.read()
            grown = len(text) > len(self.text)
            self.text = text
            return grown
        return False


class StackTaker:
    """Asks the processes of a session what they do, without waiting for them."""

    def __init__(self, session: int) -> None:
        self._began = self._grew = time.monotonic()
        self._processes = []
        for pid in find_members(session):
            where, number = _find_memory(pid)
            if where:
                self._processes.append(_Process(pid, where))
                with contextlib.suppress(OSError):
                    os.truncate(where, 0)
                    os.kill(pid, number)
        if not self._processes:
            self._processes.append(_Process(session, ""))

    def look(self) -> list[dict[str, object]] | None:
        """What each of them does; None if that is not known yet.

        The answer: pid, state (a letter of proc(5), "" if it has ended), command, stacks (as faulthandler writes them,
        "" if it did not answer), and whether it can be asked.
        """
        now = time.monotonic()
        for process in self._processes:
            if process.where and process.look():
                self._grew = now
        silent = any(process.where and not process.text for process in self._processes)
        if now - self._grew < _QUIET_S or (silent and now - self._began < _PATIENCE_S):
            return None
        return [
            {
                "pid": process.pid,
                "state": _read_state(process.pid),
                "command": _read_command(process.pid),
                "stacks": process.text.decode(errors="replace"),
                "asked": bool(process.where),
            }
            for process in self._processes
        ]


def _find_memory(pid: int) -> tuple[str, int]:
    """Where a process writes its stacks, and the signal at which it does; ("", 0) if it does not."""
    with contextlib.suppress(OSError):  # it has ended, or is not ours to look at
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                match = _NAME.match(os.readlink(f"/proc/{pid}/fd/{name}"))
                if match and int(match[1]) == pid:
                    return f"/proc/{pid}/fd/{name}", int(match[2])
    return "", 0


def _read_state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _read_command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
