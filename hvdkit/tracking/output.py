"""The output of a tracker: writes on rank 0, across changes of the world, until the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from hvdkit.hook import on_uncaught
from hvdkit.log import logger
from hvdkit.tracking.rows import Averages
from hvdkit.tracking.targets import Targets, open_writers
from hvdkit.tracking.writer import End, end_of
from hvdkit.tracking.writing_thread import WritingThread

_CLOSE_S = 60.0  # for a slow server
_FAILED_S = 10.0  # the other ranks wait for this process to end
_KILLED_S = 1.5  # hvdrun kills a rank 2 s after SIGTERM


class Output:
    """The targets of track(), and the thread that writes to them if this rank is 0; until end().

    world: of the tracker that uses it; a different object for each world.
    """

    def __init__(self, targets: Targets, world: object) -> None:
        self.targets, self.world = targets, world
        self.resume: Mapping[str, Mapping[str, str]] = {}  # name -> resume options of a writer that rank 0 has opened
        self._thread: WritingThread | None = None
        self._process = os.getpid()
        _outputs.append(self)

    @property
    def is_open(self) -> bool:
        """Whether this rank writes."""
        return self._thread is not None

    @property
    def has_run(self) -> bool:
        """Whether a run exists, as on a server, which must learn how the script ends."""
        return self.is_open and bool(self.resume)

    def open(self) -> None:
        """Open the targets on this rank, and continue existing runs. Raises what open_writers() raises."""
        if self._thread is not None:
            return
        writers = open_writers(self.targets.following(self.resume))
        self.resume = {writer.name: writer.resume for writer in writers if writer.resume}
        self._thread = WritingThread(writers)
        _watch_process()

    def put(self, rows: Sequence[Averages]) -> None:
        """Queue rows for writing; a rank that has become 0 first opens the targets, and warns if it cannot."""
        if self._thread is None:
            try:
                self.open()
            except Exception as error:
                logger.warning("track(): this rank is now rank 0, and cannot write: %s", error)
                self._thread = WritingThread(())
        assert self._thread is not None
        self._thread.put(rows)

    def leave(self) -> None:
        """Close the targets without ending the run, because another rank is 0 now and continues it."""
        if self._thread is not None:
            self._thread.close(None, _CLOSE_S)
            self._thread = None

    def begin_end(self, end: End) -> None:
        """Start writing all rows and ending the runs; end() waits for that."""
        if self._thread is not None and self._process == os.getpid():
            self._thread.begin_close(end)

    def end(self, end: End, timeout_s: float = _CLOSE_S) -> None:
        """Write all rows, and end the runs if this rank writes."""
        if self not in _outputs or self._process != os.getpid():
            return
        if self._thread is not None:
            self._thread.close(end, timeout_s)
        _outputs.remove(self)
        self._thread = None
        if not any(output.has_run for output in _outputs):
            _restore_sigterm()


#: Outputs that have not ended.
_outputs: list[Output] = []


def take_output(targets: Targets, world: object) -> Output:
    """Return the output for these targets that an earlier world has left open, or a new one."""
    for output in _outputs:
        if output.world is not world and output.targets == targets:
            output.world = world
            return output
    return Output(targets, world)


def _end_all(end: End, timeout_s: float) -> None:
    """End all outputs concurrently. timeout_s: for all of them together."""
    outputs, deadline = _outputs.copy(), time.monotonic() + timeout_s
    for output in outputs:
        output.begin_end(end)
    for output in outputs:
        output.end(end, max(0.0, deadline - time.monotonic()))


def _at_exit() -> None:
    # Python passes the code of sys.exit() to no function that runs at the end of the process.
    _end_all(end_of(getattr(sys, "last_value", None)), _CLOSE_S)


def _watch_process() -> None:
    """End the outputs when the process ends, in any way."""
    atexit.unregister(_at_exit)  # so that it runs before functions that libraries have registered since
    atexit.register(_at_exit)
    if not any(output.has_run for output in _outputs):
        return
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(number) is not _on_sigterm:
        return  # a handler that was installed later has called this one, and decides about the exit
    _end_all("KILLED", _KILLED_S)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _restore_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        with contextlib.suppress(ValueError):  # outside of the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_uncaught(error: BaseException) -> None:
    end = end_of(error)
    _end_all(end, _KILLED_S if end == "KILLED" else _FAILED_S)


on_uncaught(_on_uncaught)
