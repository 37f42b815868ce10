"""When did which operation negotiate, wait and move? A trace that Chrome's tracing page and Perfetto show.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format). Each
operation is a "process" of its own, under its name, as in Horovod's timeline.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, Protocol

_NOTHING = nullcontext()


class Named(Protocol):
    """What is shown."""

    @property
    def name(self) -> str:
        """Under which name."""


class Timeline:
    """Writes events to a file between start() and stop(), and does nothing otherwise."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._began_s = 0.0
        self._numbers: dict[str, int] = {}
        self._open: set[str] = set()

    def start(self, path: str) -> None:
        """Begin to write to `path`, anew. Raises OSError if that cannot be done, ValueError if it is on already."""
        with self._lock:
            if self._file is not None:
                raise ValueError("The timeline is on already; stop_timeline() first.")
            self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115  (stop() closes it)
            self._began_s = time.perf_counter()
            self._numbers, self._open = {}, set()
            self._file.write("[\n")
            self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "ts": 0})
            self._write(
                {
                    "name": "start_time_since_epoch_in_micros",
                    "ph": "M",
                    "pid": 0,
                    "args": {"start_time_since_epoch_in_micros": time.time_ns() // 1000},
                }
            )

    @property
    def on(self) -> bool:
        """Is it between start() and stop()?"""
        return self._file is not None

    def stop(self) -> None:
        """End the file; a timeline that is not on stays off."""
        with self._lock:
            if self._file is not None:
                self._file.write("{}]\n")
                self._file.close()
                self._file = None

    def _write(self, event: dict[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(event) + ",\n")

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers) + 1
            self._write({"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}})
            self._write({"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}})
        return number

    def _event(self, name: str, phase: str, activity: str = "") -> None:
        at = round(1e6 * (time.perf_counter() - self._began_s))
        event: dict[str, object] = {"ph": phase, "ts": at, "pid": self._number(name)}
        self._write({"name": activity, **event} if activity else event)

    def begin(self, name: str, activity: str) -> None:
        """The operation `name` begins an activity."""
        if self._file is None:
            return
        with self._lock:
            if self._file is not None:
                self._open.add(name)
                self._event(name, "B", activity)

    def end(self, name: str) -> None:
        """The activity that the operation began ends."""
        if self._file is None:
            return
        with self._lock:
            if self._file is not None and name in self._open:
                self._open.discard(name)
                self._event(name, "E")

    def span(self, activity: str, operations: Sequence[Named]) -> AbstractContextManager[None]:
        """The operations do this together, between the beginning and the end of the context."""
        return _NOTHING if self._file is None else self._span(activity, operations)

    @contextmanager
    def _span(self, activity: str, operations: Sequence[Named]) -> Iterator[None]:
        names = dict.fromkeys(operation.name for operation in operations)  # a group comes once for each tensor
        for name in names:
            self.begin(name, activity)
        try:
            yield
        finally:
            for name in names:
                self.end(name)
