"""hvdrun's stdin, for rank 0; not through the launcher: Open MPI 5's mpirun never reports the end of stdin."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

_PIECE = 1 << 16
_LOOK_S = 1.0


class StandardInput:
    """Reads some bytes for each request of rank 0's agent; in a thread, because any stdin may block.

    A terminal is read only while hvdrun is in its foreground: otherwise the terminal would stop hvdrun (SIGTTIN).
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._deliver: Callable[[bytes], None] | None = None
        self._reading = self._ended = False

    def request(self, deliver: Callable[[bytes], None]) -> None:
        """Call `deliver` with the next bytes, b"" at the end.

        It replaces a waiting request: in a restarted job, rank 0 continues where the earlier rank 0 stopped reading.
        """
        self._deliver = deliver
        if self._ended:
            self._hand_over(b"")
        elif not self._reading:
            self._reading = True
            threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            if os.isatty(self._descriptor):
                self._wait_for_typing()
            data = os.read(self._descriptor, _PIECE)
        except OSError:  # the terminal was closed, or stdin is a folder
            data = b""
        with contextlib.suppress(RuntimeError):  # the loop is closed because the job has ended
            loop.call_soon_threadsafe(self._hand_over, data)

    def _wait_for_typing(self) -> None:
        while True:
            if not self._is_in_foreground():
                time.sleep(_LOOK_S)
            elif select.select([self._descriptor], [], [], _LOOK_S)[0] and self._is_in_foreground():
                return

    def _is_in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # it is not the terminal of this session, and stops no process
            return True

    def _hand_over(self, data: bytes) -> None:
        self._reading, self._ended = False, not data
        if self._deliver is not None:
            self._deliver(data)
