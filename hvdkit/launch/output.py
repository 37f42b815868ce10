"""Where the ranks' output meets: whole lines of one rank at a time."""

from __future__ import annotations

import os

from hvdkit.launch.agent.stream import write_all

_HVDRUN = -1


class Output:
    """Writes what the ranks and hvdrun say to this process's stdout and stderr.

    A line that one rank has left open is closed before another writes. On a terminal, a line that its rank keeps
    drawing anew (a progress bar) is wiped instead: its rank will draw it again below.
    """

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        self._targets = (stdout, stderr)
        self._terminals = tuple(os.isatty(target) for target in self._targets)
        #: Do stdout and stderr go to the same place?
        self.together = all(self._terminals) or _same_file(stdout, stderr)
        self._open: dict[int, tuple[int, bool]] = {}  # stream -> (who left a line open, is it drawn anew)
        self.broken = False

    @property
    def window(self) -> tuple[int, int, bool] | None:
        """The terminal's (rows, columns, does stderr go there too); None if stdout is no terminal."""
        if not self._terminals[0]:
            return None
        try:
            columns, rows = os.get_terminal_size(self._targets[0])
        except OSError:
            return None
        return rows or 24, columns or 80, self._terminals[1]

    def write(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Pass on a piece of a rank's output; nothing more once nobody reads."""
        stream = int(is_stderr)
        line = 0 if self.together else stream
        if line in self._open and self._open[line][0] != rank:
            redrawn = self._open.pop(line)[1]
            data = (b"\r\x1b[K" if redrawn and self._terminals[stream] else b"\n") + data
        if data.endswith(b"\n"):
            self._open.pop(line, None)
        elif data:
            last = data[data.rfind(b"\n") + 1 :]
            drawn = b"\r" in last or b"\x1b[" in last
            self._open[line] = (rank, drawn or (line in self._open and self._open[line][1]))
        try:
            write_all(self._targets[stream], data)
        except OSError:
            self.broken = True

    def say(self, line: str) -> None:
        """Write a line of hvdrun's own to stderr."""
        self.write(_HVDRUN, True, f"hvdrun: {line}\n".encode(errors="backslashreplace"))

    def repeat(self, data: bytes) -> None:
        """Write what mpirun said to stderr."""
        if data:
            self.write(_HVDRUN, True, data if data.endswith(b"\n") else data + b"\n")


def _same_file(a: int, b: int) -> bool:
    try:
        return os.path.sameopenfile(a, b)
    except OSError:
        return False
