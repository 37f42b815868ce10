"""A process that is listened to while it runs."""

from __future__ import annotations

import abc
import json
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any


class Listened(abc.ABC):
    """A process whose lines are read as they come. lines: all that it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Begin to listen: what `hear` needs has to be there before."""
        self.process, self.lines = process, list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self.hear(line)

    @abc.abstractmethod
    def hear(self, line: str) -> None:
        """Keep what a line tells."""

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait_for(self, true: Callable[[], Any], seconds: float, what: str) -> float:
        """Wait until something is true; returns how long it took. Raises AssertionError with what is known."""
        began = time.monotonic()
        while not true():
            if time.monotonic() - began > seconds:
                raise AssertionError(f"not after {seconds:.1f} s: {what}\n{self.describe()}")
            time.sleep(0.01)
        return time.monotonic() - began

    def describe(self) -> str:
        """What is known of it when it was waited for in vain."""
        return self.output

    def result(self) -> Any:
        return json.loads(next(line for line in self.lines if '"summary"' in line).partition("] ")[2])
