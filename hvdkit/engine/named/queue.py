"""What a rank has to announce, until somebody looks after it."""

from __future__ import annotations

import threading
import time

from hvdkit.engine.named.announcement import Announcement
from hvdkit.engine.observe.stragglers import Window

_PAUSE_S = 0.001
_MOST_PAUSES = 10


class Outbox:
    """Announcements from any thread, and how the rounds of plans go."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Announcement, int]] = []
        self._windows: list[Window] = []
        self._adding = threading.Lock()

    def add(self, name: str, asked: Announcement, lane: int = 0) -> None:
        """Announce an operation with the next message. lane: the position after that at which it has been shown."""
        with self._adding:
            self._waiting.append((name, asked, lane))

    def add_window(self, window: Window) -> None:
        """Say with the next message how some rounds of a plan went here."""
        with self._adding:
            self._windows.append(window)

    def __bool__(self) -> bool:
        return bool(self._waiting or self._windows)

    def let_gather(self) -> None:
        """Return soon; later while announcements go on coming, as they do many at a time."""
        more = -1
        for _ in range(_MOST_PAUSES):
            time.sleep(_PAUSE_S)
            before, more = more, len(self._waiting)
            if more in (0, before):
                return

    def take(self) -> list[tuple[str, Announcement, int]]:
        """All that waits, as (name, announcement, lane); called by one thread at a time."""
        with self._adding:
            waiting, self._waiting = self._waiting, []
        return waiting

    def take_windows(self) -> list[Window]:
        """How rounds went, as far as nobody has been told."""
        if not self._windows:
            return []
        with self._adding:
            windows, self._windows = self._windows, []
        return windows
