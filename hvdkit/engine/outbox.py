"""What a rank has to tell rank 0, until the next message goes there."""

from __future__ import annotations

import pickle
import threading
import time

import numpy as np

from hvdkit.engine.announcement import Announcement
from hvdkit.engine.roll_call import Directory
from hvdkit.engine.vocabulary import Said

_PAUSE_S = 0.001
_MOST_PAUSES = 10

#: Of an announcement in a message: name, what Said.say() gives for it, and lane.
Item = tuple[str, int, Announcement | None, int]


class Outbox:
    """Announcements from any thread. directory: of those that are said by number."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._said: Said[Announcement] = Said()
        self._waiting: list[tuple[str, Announcement, int]] = []
        self._adding = threading.Lock()

    def add(self, name: str, asked: Announcement, lane: int = 0) -> None:
        """Announce an operation with the next message. lane: the position after that at which it has been shown."""
        with self._adding:
            self._waiting.append((name, asked, lane))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def let_gather(self) -> None:
        """Return soon; later while announcements go on coming, as they do many at a time."""
        more = -1
        for _ in range(_MOST_PAUSES):
            time.sleep(_PAUSE_S)
            before, more = more, len(self._waiting)
            if more in (0, before):
                return

    def pack(self, met: int) -> bytes:
        """The message with all that waits; called by one thread at a time, and what it gives is sent in that order.

        met: see FastLane.
        """
        with self._adding:
            waiting, self._waiting = self._waiting, []
        items: list[Item] = []
        numbers: list[int] = []
        find = self._directory.find
        for name, asked, lane in waiting:
            number = -1 if lane else find(name, asked)
            if number >= 0:
                numbers.append(number)
            else:
                items.append((name, *self._said.say(asked), lane))
        content = met, np.array(numbers, np.int32).tobytes(), items
        return pickle.dumps(("announce", content), pickle.HIGHEST_PROTOCOL)
