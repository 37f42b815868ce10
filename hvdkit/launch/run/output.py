"""Write the output of ranks and launcher, whole lines of a rank at a time; handle the signals that end a job."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio


_HVDRUN = -1
# A return to the line's start, or a control sequence other than that of a colour.
_REDRAWS = re.compile(rb"\r|\x1b\[[0-?]*[ -/]*[@-ln-~]")
_UNREAD_S = 1.0  # time for which a write waits for its reader after a signal to end hvdrun
_PIECE = 1 << 14


# The rest of a line that was closed: its end, or the bytes that redraw it, with the prefix.
_STARTS_A_LINE = re.compile(rb"\n|\r|\x1b")


class _OpenLine(NamedTuple):
    """A line without its end. drawn: its rank redraws it repeatedly."""

    rank: int
    stream: int
    drawn: bool


class _UnreadError(OSError):
    """The reader of the output does not read."""


class Output:
    """Writes the output of the ranks and hvdrun to this process's stdout and stderr.

    A line that one rank has left open is closed before another rank writes; the rest of the line later gets the rank's
    prefix too. On a terminal, a line that its rank redraws repeatedly (a progress bar) is erased instead: its rank will
    redraw it below.
    """

    def __init__(
        self, stdout: int = 1, stderr: int = 2, *, quiet: bool = False, shown: Collection[int] | None = None
    ) -> None:
        """Write to these descriptors. quiet: hold notes back. shown: the ranks whose output is shown; None for all."""
        self._quiet, self._shown = quiet, shown
        self._notes: list[str] = []
        self._targets = (stdout, stderr)
        self._terminals = tuple(os.isatty(target) for target in self._targets)
        #: Do stdout and stderr go to the same place?
        self.together = all(self._terminals) or _same_file(stdout, stderr)
        #: Write the prefix of a rank's lines.
        self.prefix_of: Callable[[int], bytes] = lambda rank: b""
        #: Write the held output of the ranks; called before each line of hvdrun's own, which may refer to it.
        self.flush_ranks: Callable[[], None] = lambda: None
        self._open: dict[int, _OpenLine] = {}  # by stream
        self._cut: set[tuple[int, int]] = set()  # (rank, stream) whose open line another rank has closed
        #: Why the output cannot be written any more; None while it can.
        self.broken: OSError | None = None
        self._unwritable: set[int] = set()  # streams
        self._writing_since = 0.0  # start of the current write; 0 for none

    @property
    def window(self) -> tuple[int, int, bool] | None:
        """Return (rows, columns, does stderr go there too) of the terminal; None if stdout is no terminal."""
        if not self._terminals[0]:
            return None
        try:
            columns, rows = os.get_terminal_size(self._targets[0])
        except OSError:
            return None
        return rows or 24, columns or 80, self._terminals[1]

    def takes_colours(self, environ: Mapping[str, str]) -> bool:
        """Do stdout and stderr go to a terminal with colours, and does the user want colours (no-color.org)?"""
        return all(self._terminals) and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"

    def write(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Write some of a rank's output; it is discarded once the output cannot be written any more."""
        stream = int(is_stderr)
        if stream in self._unwritable or (rank != _HVDRUN and not self.shows(rank)):
            return
        line = 0 if self.together else stream
        before = self._open.get(line)
        if (rank, stream) in self._cut:
            self._cut.discard((rank, stream))
            if _STARTS_A_LINE.match(data):
                data = data.removeprefix(b"\n")
            else:
                data = self.prefix_of(rank) + data
            if not data:
                return
        if before is not None and before.rank != rank:
            del self._open[line]
            redrawn = before.drawn and self._terminals[stream]
            if not redrawn:
                self._cut.add((before.rank, before.stream))
            data = (b"\r\x1b[K" if redrawn else b"\n") + data
        if data.endswith(b"\n"):
            self._open.pop(line, None)
        elif data:
            last = data[data.rfind(b"\n") + 1 :]
            drawn = _REDRAWS.search(last) is not None
            self._open[line] = _OpenLine(rank, stream, drawn or (line in self._open and self._open[line].drawn))
        try:
            self._write_all(self._targets[stream], data)
        except OSError as error:
            self._writing_since = 0.0
            self.broken = self.broken or error
            self._unwritable.update((0, 1) if self.together else (stream,))

    def _write_all(self, target: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._writing_since = time.monotonic()
            view = view[os.write(target, view[:_PIECE]) :]
        self._writing_since = 0.0

    def leave_unread_write(self) -> float:
        """Make write() return if it has waited for its reader for a second; to be called by a signal's handler.

        Returns the seconds until then; 0 if nothing is being written.
        """
        since_s = self._writing_since
        left_s = since_s + _UNREAD_S - time.monotonic() if since_s else 0.0
        if since_s and left_s <= 0:
            self._writing_since = 0.0
            raise _UnreadError
        return left_s

    def shows(self, rank: int) -> bool:
        """Is the output of this rank shown?"""
        return self._shown is None or rank in self._shown

    def note(self, line: str) -> None:
        """Write a line that helps only with problems; if quiet, it is written before the first line of `say`."""
        if self._quiet:
            self._notes.append(line)
        else:
            self.say(line)

    def say(self, line: str) -> None:
        """Write a line of hvdrun's own to stderr."""
        self.flush_ranks()
        notes, self._notes = self._notes, []
        for note in notes:
            self.say(note)
        self.write(_HVDRUN, True, f"hvdrun: {line}\n".encode(errors="backslashreplace"))

    def repeat(self, data: bytes) -> None:
        """Write mpirun's output to stderr."""
        if data:
            self.write(_HVDRUN, True, data if data.endswith(b"\n") else data + b"\n")


def _same_file(a: int, b: int) -> bool:
    try:
        return os.path.sameopenfile(a, b)
    except OSError:
        return False


_HELD_S = 1.0
# On a busy machine the ssh that mpirun has started can be faster than mpirun.
_HARMLESS = re.compile(rb"^\[\S+\] plm:ssh: Warning: setpgid\(.*\n", re.MULTILINE)


class LauncherOutput:
    """Shows the launcher's output after a delay, unless it is about the end of a rank, which hvdrun reports better.

    at_once: show it without delay. wanted: decides after the delay whether to show it.
    """

    def __init__(self, output: Output, *, at_once: bool, wanted: Callable[[], bool]) -> None:
        self._output, self._at_once, self._wanted = output, at_once, wanted
        self._held = bytearray()

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read the launcher's output to its end."""
        import asyncio

        while data := await stream.read(1 << 16):
            self._held += data
            if self._at_once:
                self.show()
            else:
                asyncio.get_running_loop().call_later(_HELD_S, self._show_if_wanted)

    def show(self) -> None:
        """Show the output that was not shown yet."""
        self._output.repeat(_HARMLESS.sub(b"", self._held))
        self._held.clear()

    def _show_if_wanted(self) -> None:
        if self._wanted():
            self.show()


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Handles the signals that request hvdrun to end the job.

    number: the first signal; 0 for none.
    hurried: ranks get no time to save, because of SIGHUP or a second signal. SIGTERM after SIGTERM does not count,
    because schedulers send it more than once.
    on_signal: called after each signal.
    output: a write to it that waits for a reader does not keep hvdrun from ending.
    """

    def __init__(self, output: Output) -> None:
        self.number = 0
        self.hurried = False
        self.on_signal: Callable[[], None] = lambda: None
        self._output = output

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside this context; the loop must be running."""
        import asyncio  # slow to load, and hvdrun --help imports this module

        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._record, number)
            signal.signal(number, self._unblock)  # called at once; the loop calls _record when no write blocks it
        signal.signal(signal.SIGALRM, self._unblock)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _record(self, number: signal.Signals) -> None:
        again = self.number != 0 and (self.number, number) != (signal.SIGTERM, signal.SIGTERM)
        self.hurried = self.hurried or again or number == signal.SIGHUP
        self.number = self.number or int(number)
        self.on_signal()

    def _unblock(self, number: int, frame: object) -> None:
        left_s = self._output.leave_unread_write()
        if left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, left_s)
