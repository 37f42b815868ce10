"""One output of a rank's command, and the terminal it may be."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time
from collections import deque

from .prefix import Prefixer

HOLD_S = 0.5  # an unfinished line waits this long for its end
LINE_BYTES = 1 << 20  # a longer line is passed on in pieces
TAIL_LINES = 20


class Log:
    """A rank's log file. When it cannot be written any more, as on a full disk, the rank goes on without it."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._failed, self._problem = False, ""

    def write(self, data: bytes) -> None:
        """Write, unless that has failed before."""
        if not self._failed:
            try:
                write_all(self._target, data)
            except OSError as error:
                self._failed, self._problem = True, error.strerror or str(error)

    def take_problem(self) -> str:
        """Why writing has failed, the first time that this is called after it has; else ""."""
        problem, self._problem = self._problem, ""
        return problem


class Stream:
    """One output of the command: read from, logged, prefixed, passed on in whole lines."""

    def __init__(self, source: int, kind: bytes, prefixer: Prefixer, *, live: bool, log: Log | None) -> None:
        self.source, self.kind, self.live = source, kind, live
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.held_since = 0.0
        self._prefixer, self._log = prefixer, log
        self._pending, self._line = bytearray(), b""

    def read(self) -> bytes | None:
        """Read once; None at the end of the output."""
        try:
            data = os.read(self.source, 1 << 16)
        except OSError:  # how a terminal says that its other side is closed
            data = b""
        if not data:
            return None
        if self._log is not None:
            self._log.write(data)
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[-4096:]
        self.tail.extend(lines[-TAIL_LINES:])
        self._pending += data
        cut = self._pending.rfind(b"\n") + 1
        drawn = self.live and (b"\x1b" in self._pending[cut:] or b"\r" in self._pending[cut:])
        return self._take(len(self._pending) if drawn or len(self._pending) > LINE_BYTES else cut)

    def flush(self) -> bytes:
        """Pass on an unfinished line."""
        return self._take(len(self._pending))

    def finish(self) -> bytes:
        """Pass on all that is left."""
        if self._line:
            self.tail.append(self._line)
        return self.flush() + self._prefixer.finish()

    def _take(self, cut: int) -> bytes:
        piece = bytes(self._pending[:cut])
        del self._pending[:cut]
        if not self._pending:
            self.held_since = 0.0
        elif cut or not self.held_since:
            self.held_since = time.monotonic()
        return self._prefixer.feed(piece)


def write_all(target: int, data: bytes) -> None:
    """Write all of `data`, however often the system takes only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def open_log(folder: str, rank: int, *, again: bool = False) -> Log | None:
    """Open the rank's log file in `folder`, which is made if it is not there; None without a folder.

    again: the job is started again, and what is there is of its own.
    """
    if not folder:
        return None
    os.makedirs(folder, exist_ok=True)
    how = os.O_APPEND if again else os.O_TRUNC
    return Log(os.open(os.path.join(folder, f"rank.{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o666))


def open_terminal(rows: int, columns: int) -> tuple[int, int]:
    """Open a pseudo-terminal of this size that passes output on as it is written."""
    outer, inner = os.openpty()
    modes = termios.tcgetattr(inner)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(inner, termios.TCSANOW, modes)
    set_window(outer, rows, columns)
    return outer, inner


def set_window(terminal: int, rows: int, columns: int) -> None:
    """Give a terminal its size; programs in it are told by SIGWINCH."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, max(columns, 20), 0, 0))
