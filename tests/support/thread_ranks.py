"""Ranks that are threads of this process, for objects that need no more of a transport than its mailbox and check()."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hvdkit.errors import RankLostError


class ThreadMailbox:
    """See Mailbox: rank 0 exchanges messages with every rank."""

    star = True

    def __init__(self, rank: int, boxes: Sequence[queue.SimpleQueue[tuple[int, bytes]]]) -> None:
        self._rank, self._boxes = rank, boxes

    def send(self, rank: int, message: bytes) -> None:
        """See Mailbox.send."""
        assert 0 in (rank, self._rank), "only rank 0 can exchange messages with each other rank"
        self._boxes[rank].put((self._rank, message))

    def receive(self) -> list[tuple[int, bytes]]:
        """See Mailbox.receive."""
        box = self._boxes[self._rank]
        return [box.get() for _ in range(box.qsize())]

    def close(self, *, idle: bool = True) -> None:
        """See Mailbox.close."""


class ThreadTransport:
    """The mailbox and the check of a transport. lost: set when the last rank has ended."""

    def __init__(self, rank: int, boxes: Sequence[queue.SimpleQueue[tuple[int, bytes]]], lost: threading.Event) -> None:
        self.rank, self.size, self._boxes, self.lost = rank, len(boxes), boxes, lost

    def open_mailbox(self) -> ThreadMailbox:
        """See Transport.open_mailbox."""
        return ThreadMailbox(self.rank, self._boxes)

    def check(self) -> None:
        """See Transport.check."""
        if self.lost.is_set():
            raise RankLostError(f"Rank {self.size - 1} was lost.")


def on_threads(size: int, body: Callable[[Any], Any]) -> list[Any]:
    """Call `body` with the transport of each rank in a thread of its own; returns results or exceptions by rank."""
    boxes: list[queue.SimpleQueue[tuple[int, bytes]]] = [queue.SimpleQueue() for _ in range(size)]
    lost = threading.Event()

    def call(rank: int) -> Any:
        try:
            return body(ThreadTransport(rank, boxes, lost))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))
