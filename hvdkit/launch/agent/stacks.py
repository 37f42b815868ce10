"""Collect the stacks of a rank's processes, for `hvdkit stacks`. See hvdkit/stacks.py for the other side."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from typing import NamedTuple

from .session_reaper import list_session, read_process

_NAME = re.compile(r"/memfd:hvdkit-stacks-(\d+)-(\d+)-(\d+)-(\d+)")
_QUIET_S = 0.1  # a dump that has not grown for so long is complete
_POLITE_S, _PATIENCE_S = 0.5, 1.5
# The number for syscall(2): older systems have no function for it.
_TGKILL = {"x86_64": 234, "ppc64le": 250}.get(os.uname().machine, 131)


class _Memory(NamedTuple):
    """The memory into which a process writes its stacks.

    path: of the memory.
    signal: makes the process write the stack of its main thread.
    pipe, inode: a byte in this pipe requests the stacks of all threads. The descriptor may have been reused since; the
    inode shows whether it is still the pipe.
    """

    path: str
    signal: int
    pipe: str
    inode: str


class _Process:
    """A process that can be queried if it has memory for stacks. text: its answer."""

    def __init__(self, pid: int) -> None:
        self.pid, self.memory = pid, _find_memory(pid)
        self.text = b""

    @property
    def silent(self) -> bool:
        """Can it answer, but has not?"""
        return self.memory is not None and not self.text

    def ask(self) -> None:
        """Request the stacks of all threads."""
        if self.memory is None:
            return
        with contextlib.suppress(OSError):  # it has ended, or has so many requests that the pipe is full
            os.truncate(self.memory.path, 0)
            if os.readlink(self.memory.pipe) == f"pipe:[{self.memory.inode}]":
                pipe = os.open(self.memory.pipe, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(pipe, b"?")
                finally:
                    os.close(pipe)

    def ask_main_thread(self) -> None:
        """Request the stack of the main thread, which answers even in C code."""
        if self.memory is not None:  # as tgkill(2); kill(2) may choose another thread
            ctypes.CDLL(None).syscall(*map(ctypes.c_long, (_TGKILL, self.pid, self.pid, self.memory.signal)))

    def collect(self) -> bool:
        """Read the memory; True if it has more text than before."""
        with contextlib.suppress(OSError):  # it has ended
            if self.memory is not None:
                with open(self.memory.path, "rb") as file:
                    text = file.read()
                grown = len(text) > len(self.text)
                self.text = text
                return grown
        return False


class StackCollector:
    """Collects the stacks of the processes of a session, without waiting for them."""

    def __init__(self, session: int) -> None:
        self._began = self._grew = time.monotonic()
        processes = [_Process(pid) for pid in list_session(session)]
        self._processes = [each for each in processes if each.memory] or [_Process(session)]
        self._polite = True
        for process in self._processes:
            process.ask()

    def collect(self) -> list[dict[str, object]] | None:
        """Return the stacks of each process; None if they are not complete yet.

        Of each process: pid, state (a letter of proc(5), "" if it has ended), command, stacks (as faulthandler writes
        them, "" if it did not answer), and `asked`: whether it can be queried.
        """
        now = time.monotonic()
        for process in self._processes:
            if process.collect():
                self._grew = now
        silent = [process for process in self._processes if process.silent]
        if self._polite and now - self._began > _POLITE_S:
            self._polite = False
            for process in silent:
                process.ask_main_thread()
        if now - self._grew < _QUIET_S or (silent and now - self._began < _PATIENCE_S):
            return None
        return [
            {
                "pid": process.pid,
                "state": read_process(process.pid, "stat").rpartition(")")[2].strip()[:1],
                "command": read_process(process.pid, "cmdline").rstrip("\0").replace("\0", " "),
                "stacks": process.text.decode(errors="replace"),
                "asked": process.memory is not None,
            }
            for process in self._processes
        ]


def _find_memory(pid: int) -> _Memory | None:
    """Find the memory of a process for its stacks; None without such memory."""
    files = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for name in os.listdir(files):
            with contextlib.suppress(OSError):
                match = _NAME.match(os.readlink(f"{files}/{name}"))
                if match and int(match[1]) == pid:
                    return _Memory(f"{files}/{name}", int(match[2]), f"{files}/{match[3]}", match[4])
    return None
