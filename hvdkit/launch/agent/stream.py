"""One output stream of a rank's command: prefixes of its lines, its log, and a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import time
from collections import deque

# Returns to a line's start or its end, a control sequence (CSI, OSC or short), text.
_TOKENS = re.compile(
    rb"\r+\n?|\n|\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]|[^\r\n\x1b]+|\x1b"
)
# An incomplete control sequence or line end.
_UNFINISHED = re.compile(rb"(?:\r+|\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[ -/]*))\Z")
_LONGEST_SEQUENCE = 256

# Colours of text on a terminal: cyan, green, yellow, magenta, blue; red is for errors.
_COLOURS = (36, 32, 33, 35, 34)


def format_prefix(rank: int, host: str, wish: str) -> tuple[bytes, bytes]:
    """Write the prefix of a rank's lines: plain, and in the rank's colour if `wish` requests it.

    host: "" on one host. wish: HVDKIT_PREFIX, "0" for no prefix, "colour" for colours.
    """
    plain = b"" if wish == "0" else f"[{rank}{host and ' '}{host}] ".encode()
    if wish != "colour":
        return plain, plain
    return plain, b"\x1b[%dm%b\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], plain.rstrip())


class Prefixer:
    """Puts a prefix before the text of each line, also if a program returns to a line's start to redraw it.

    terminal: the program draws on a terminal; an empty line gets no prefix, because the program may draw on it.
    """

    def __init__(self, prefix: bytes, *, terminal: bool = False) -> None:
        self._prefix, self._terminal = prefix, terminal
        self._at_start, self._tail = True, b""

    def feed(self, data: bytes) -> bytes:
        """Return `data` with prefixes; an incomplete control sequence is returned with the next call."""
        data = self._tail + data
        unfinished = _UNFINISHED.search(data, max(0, len(data) - _LONGEST_SEQUENCE))
        end = unfinished.start() if unfinished else len(data)
        data, self._tail = data[:end], data[end:]
        if not data:
            return b""
        if self._terminal or b"\r" in data or b"\x1b" in data:
            return b"".join(self._mark(data))
        marked = (self._prefix if self._at_start else b"") + data.replace(b"\n", b"\n" + self._prefix)
        self._at_start = data.endswith(b"\n")
        return marked.removesuffix(self._prefix) if self._at_start else marked

    def finish(self) -> bytes:
        """Return the text that was held back."""
        tail, self._tail = self._tail, b""
        return tail

    def _mark(self, data: bytes) -> list[bytes]:
        parts = []
        for token in _TOKENS.findall(data):
            newline = token.endswith(b"\n")
            text = not newline and token[:1] not in (b"\r", b"\x1b")
            if self._at_start and (text or (newline and not self._terminal)):
                parts.append(self._prefix)
            parts.append(token)
            if text:
                self._at_start = False
            elif newline or token.startswith(b"\r"):
                self._at_start = True
        return parts


HOLD_S = 0.5  # an unfinished line waits this long for its end
LINE_BYTES = 1 << 20  # a longer line is relayed in several writes
TAIL_LINES = 20


class Log:
    """A rank's log file. If it cannot be written any more, as on a full disk, the rank continues without it."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._failed, self._problem = False, ""

    def write(self, data: bytes) -> None:
        """Write, unless a write has failed before."""
        if not self._failed:
            try:
                write_all(self._target, data)
            except OSError as error:
                self._failed, self._problem = True, error.strerror or str(error)

    def take_problem(self) -> str:
        """Return why a write has failed, in the first call after the failure; else ""."""
        problem, self._problem = self._problem, ""
        return problem


class Stream:
    """One output stream of the command: reads it, logs it, adds prefixes and relays whole lines."""

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
        except OSError:  # the error of a terminal whose other side is closed
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
        """Return an unfinished line."""
        return self._take(len(self._pending))

    def finish(self) -> bytes:
        """Return the rest of the output."""
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
    """Write all of `data`, in several calls if the system accepts only part of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def open_log(folder: str, rank: int, *, again: bool = False) -> Log | None:
    """Open the rank's log file in `folder`, which is created if needed; None without a folder.

    again: the job is restarted, and an existing log is its own.
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
    """Set the size of a terminal; programs in it get SIGWINCH."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, max(columns, 20), 0, 0))
