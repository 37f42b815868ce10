"""The stdin of rank 0's command: a pipe into which the agent writes the bytes from hvdrun."""

from __future__ import annotations

import os
import select
from collections.abc import Collection


class InputPipe:
    """The pipe. hvdrun sends the next bytes only after all earlier bytes are written, so that few are buffered here.

    source: the command's end, to be closed here once it has started.
    """

    def __init__(self) -> None:
        self.source, self._target = os.pipe()
        os.set_blocking(self._target, False)
        self._pending = memoryview(b"")
        self._ended = False

    def feed(self, data: bytes) -> None:
        """Take bytes from hvdrun; b"" at the end of its stdin."""
        self._pending, self._ended = memoryview(data), not data

    def register(self, poll: select.poll) -> None:
        """Make `poll` report when bytes can be written, or that the command has closed its stdin."""
        if self._target < 0:
            return
        poll.register(self._target, select.POLLOUT if self._pending else 0)
        if self._ended:
            poll.unregister(self._target)
            os.close(self._target)
            self._target = -1

    def write(self, ready: Collection[int]) -> bool:
        """Write as much as fits; returns whether hvdrun should send more."""
        if self._target not in ready:
            return False
        try:
            written = os.write(self._target, self._pending) if self._pending else 0
        except BlockingIOError:  # less than a page is free
            return False
        except OSError:
            written = 0
        self._pending = self._pending[written:]
        self._ended = not written  # the command has closed its stdin, or has ended
        return not self._ended and not self._pending
