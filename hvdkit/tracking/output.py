"""What a tracker writes to: on the rank that is 0, whatever happens to the world, and to the end of the process."""

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
from hvdkit.tracking import exit_call
from hvdkit.tracking.rows import Averages
from hvdkit.tracking.targets import Targets, open_writers
from hvdkit.tracking.writer import End, end_of
from hvdkit.tracking.writing_thread import WritingThread

_CLOSE_S = 60.0  # for a slow server
_FAILED_S = 10.0  # the other ranks wait for the end of this process
_KILLED_S = 1.5  # hvdrun kills a rank 2 s after SIGTERM


class Output:
    """The places that track() was given, and the thread that writes there if this rank is 0; until end().

    world: of the tracker that uses it, an object of its own for each world.
    """

    def __init__(self, targets: Targets, world: object) -> None:
        self.targets, self.world = targets, world
        self.resume: Mapping[str, Mapping[str, str]] = {}  # of the writers that rank 0 has opened, by name
        self._thread: WritingThread | None = None
        self._process = os.getpid()
        _outputs.append(self)

    @property
    def is_open(self) -> bool:
        """Does this rank write?"""
        return self._thread is not None

    @property
    def has_run(self) -> bool:
        """Is there a run, on a server say, which has to be told how the script ends?"""
        return self.is_open and bool(self.resume)

    def open(self) -> None:
        """Open the places on this rank, and go on in the runs that there are. Raises as open_writers()."""
        if self._thread is not None:
            return
        writers = open_writers(self.targets.following(self.resume))
        self.resume = {writer.name: writer.resume for writer in writers if writer.resume}
        self._thread = WritingThread(writers)
        _watch_process()

    def put(self, rows: Sequence[Averages]) -> None:
        """Have rows written; a rank that has become 0 opens the places first, and warns if it cannot."""
        if self._thread is None:
            try:
                self.open()
            except Exception as error:
                logger.warning("track(): this rank is now rank 0, and cannot write: %s", error)
                self._thread = WritingThread(())
        assert self._thread is not None
        exit_call.forget()
        self._thread.put(rows)

    def leave(self) -> None:
        """Close the places without an end of the run: another rank is 0 now, and goes on there."""
        if self._thread is not None:
            self._thread.close(None, _CLOSE_S)
            self._thread = None

    def begin_end(self, end: End) -> None:
        """Have the thread write all, and end the runs; end() waits for it."""
        if self._thread is not None and self._process == os.getpid():
            self._thread.begin_close(end)

    def end(self, end: End, timeout_s: float = _CLOSE_S) -> None:
        """Write all, and end the runs on the rank that writes."""
        if self not in _outputs or self._process != os.getpid():
            return
        if self._thread is not None:
            self._thread.close(end, timeout_s)
        _outputs.remove(self)
        self._thread = None
        if not any(output.has_run for output in _outputs):
            _restore_sigterm()
            exit_call.stop()


#: That have not ended.
_outputs: list[Output] = []


def take_output(targets: Targets, world: object) -> Output:
    """The output of a tracker of these places that an earlier world has left open, or a new one."""
    for output in _outputs:
        if output.world is not world and output.targets == targets:
            output.world = world
            return output
    return Output(targets, world)


def _end_all(end: End, timeout_s: float) -> None:
    """End all outputs at the same time. timeout_s: for all of them together."""
    outputs, deadline = _outputs.copy(), time.monotonic() + timeout_s
    for output in outputs:
        output.begin_end(end)
    for output in outputs:
        output.end(end, max(0.0, deadline - time.monotonic()))


def _at_exit() -> None:
    _end_all(end_of(getattr(sys, "last_value", None) or exit_call.last()), _CLOSE_S)


def _watch_process() -> None:
    """Have the outputs end with the process, whichever way that does."""
    atexit.unregister(_at_exit)  # it comes before what the libraries have registered since
    atexit.register(_at_exit)
    if not any(output.has_run for output in _outputs):
        return
    exit_call.watch()
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(number) is not _on_sigterm:
        return  # a handler that was installed later has called this one, and decides
    _end_all("KILLED", _KILLED_S)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _restore_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_uncaught(error: BaseException) -> None:
    end = end_of(error)
    _end_all(end, _KILLED_S if end == "KILLED" else _FAILED_S)


on_uncaught(_on_uncaught)
