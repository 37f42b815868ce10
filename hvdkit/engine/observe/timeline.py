"""The timeline: a trace of each operation's activities, for Chrome's tracing page and Perfetto.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format). Each
operation is a "process" of its own, under its name, as in Horovod's timeline.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO

from hvdkit.engine.named.operation import Operation
from hvdkit.engine.observe.device_clock import READINGS

_NOTHING = nullcontext()


class Timeline:
    """Writes events to a file between start() and stop(), and does nothing otherwise.

    on: Is a file open? Any thread may call the methods; a lock serializes the lines of the file.
    """

    def __init__(self) -> None:
        self.on = False
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._began_s = 0.0
        self._numbers: dict[str, int] = {}
        self._open: set[str] = set()  # operations with an activity that has not ended

    def start(self, path: str) -> None:
        """Begin a new file. Raises OSError if it cannot be written, ValueError if a file is open already."""
        with self._lock:
            if self._file is not None:
                raise ValueError("start_timeline(): a timeline is already being written. Call stop_timeline() first.")
            self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115  (stop() closes it)
            self._began_s = time.perf_counter()
            self._numbers, self._open = {}, set()
            self._file.write("[\n")
            self._write("CYCLE_START", "i", 0, s="g", ts=0)
            epoch = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._write("start_time_since_epoch_in_micros", "M", 0, args=epoch)
            self.on = True

    def stop(self) -> None:
        """End the file, if a file is open. Waits for rounds that are under way on a device."""
        if self.on:
            READINGS.read_pending()
        with self._lock:
            self.on = False
            if self._file is not None:
                self._file.write("{}]\n")
                self._file.close()
                self._file = None

    def begin(self, name: str, activity: str, at_s: float | None = None) -> None:
        """Begin an activity of the operation `name`. at_s: when, in seconds of perf_counter(); now if None."""
        if self.on:
            with self._lock:
                self._open.add(name)
                self._event(name, "B", activity, at_s)

    def end(self, name: str, at_s: float | None = None) -> None:
        """End the activity of the operation `name`, if it has one. at_s: see begin()."""
        if self.on:
            with self._lock:
                if name in self._open:
                    self._open.discard(name)
                    self._event(name, "E", at_s=at_s)

    def span(self, activity: str, operations: Sequence[Operation]) -> AbstractContextManager[None]:
        """Return a context manager for an activity that these operations share."""
        return self._span(activity, operations) if self.on else _NOTHING

    @contextmanager
    def _span(self, activity: str, operations: Sequence[Operation]) -> Iterator[None]:
        names = dict.fromkeys(operation.name for operation in operations)  # a group occurs once for each tensor
        for name in names:
            self.begin(name, activity)
        try:
            yield
        finally:
            for name in names:
                self.end(name)

    def _event(self, name: str, phase: str, activity: str = "", at_s: float | None = None) -> None:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers) + 1
            self._write("process_name", "M", number, args={"name": name})
            self._write("process_sort_index", "M", number, args={"sort_index": number})
        now_s = time.perf_counter() if at_s is None else at_s
        self._write(activity, phase, number, ts=round(1e6 * (now_s - self._began_s)))

    def _write(self, name: str, phase: str, number: int, **fields: object) -> None:
        """Write an event of a "process"; the caller holds the lock. Does nothing after stop()."""
        if self._file is not None:
            event = {"name": name} if name else {}
            self._file.write(json.dumps({**event, "ph": phase, "pid": number, **fields}) + ",\n")
