"""Small messages that the ranks of a host show each other without a word before: who has all of them has an allgather.

A lane has positions 0, 1, 2, ... At each one every rank may show one message under a key. When all ranks have shown one
under the same key at the same position, each of them knows that, and has all messages. Nothing that was shown is taken
back, so ranks never differ about that; only a rank that has not looked yet does not know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import STORAGE, Buffer
from hvdkit.transport.shared.flags import order
from hvdkit.transport.shared.segment import Segment, open_segment

_SLOTS = 4  # positions that are remembered: a rank may be so far ahead of the slowest reader
_LINE = 64
_MOST_BYTES = 64 * 1024  # of a message; larger ones are done as fast by other means
_TOGETHER_BYTES = 512 * 1024  # of all ranks' messages: each rank reads all of them

_VIEWS = 256  # of parts of messages that are kept, since they are looked at again and again

MISSING, EQUAL, DIFFERENT = range(3)


class Lane:
    """The lane of a group on one host; made and closed by all its ranks together.

    limit: bytes of a message. position: the next one, or the present one between show() and leave().
    """

    def __init__(self, rank: int, size: int, segment: Segment | None = None) -> None:
        self.limit = lane_limit(size)
        self.position = 0
        self._rank, self._segment = rank, segment
        memory = segment.memory if segment else np.zeros(lane_bytes(size), np.uint8)
        stride = lane_bytes(size) // size
        self._areas = [memory[at * stride : (at + 1) * stride] for at in range(size)]
        # A line each: positions read | (position, key) of slot 0 | of slot 1 | ...
        self._numbers = [area[: _LINE * (1 + _SLOTS)].data.cast("q") for area in self._areas]
        self._own = self._numbers[rank]
        self._views: dict[tuple[int, int, int, str], tuple[Buffer, ...]] = {}
        self._peers = self._numbers[:rank] + self._numbers[rank + 1 :]

    def show(self, key: int, message: Sequence[Buffer]) -> bool:
        """Show a message of at most `limit` bytes here; not while a rank still reads what it replaces.

        key: 63 bits. False if it was not shown.
        """
        position = self.position
        for peer in self._peers:
            if peer[0] <= position - _SLOTS:
                return False
        slot, own = position % _SLOTS, self._own
        at = self._start(slot)
        for buffer in message:
            self._areas[self._rank][at : at + buffer.nbytes] = buffer.array.view(np.uint8)
            at += _padded(buffer.nbytes)
        line = 8 * (1 + slot)
        own[line + 1] = key
        order()
        own[line] = position + 1
        self._line, self._key = line, key
        return True

    def look(self) -> int:
        """EQUAL if all ranks have shown a message under this rank's key; DIFFERENT if one never will; MISSING else."""
        line, shown, key = self._line, self.position + 1, self._key
        for peer in self._peers:
            if peer[line] < shown:
                return MISSING
            if peer[line + 1] != key:
                return DIFFERENT
        order()
        return EQUAL

    def read(self, at: int, count: int, dtype: str) -> Sequence[Buffer]:
        """A part of every rank's message, until leave(). at: bytes before it, padded as message_bytes() counts them."""
        where = (self.position % _SLOTS, at, count, dtype)
        known = self._views.get(where)
        if known is not None:
            return known
        storage = STORAGE[dtype]
        start = self._start(where[0]) + at
        stop = start + count * storage.itemsize
        views = tuple(Buffer(area[start:stop].view(storage), dtype) for area in self._areas)
        if len(self._views) < _VIEWS:
            self._views[where] = views
        return views

    def leave(self) -> None:
        """This rank has read what it wants at this position, and goes to the next one."""
        order()
        self.position += 1
        self._own[0] = self.position

    def skip_to(self, position: int) -> None:
        """Go on at a later position: at those before some rank has shown what nobody can answer any more."""
        if position > self.position:
            self.position = position
            self._own[0] = position

    def _start(self, slot: int) -> int:
        return _LINE * (1 + _SLOTS) + slot * self.limit

    def close(self) -> None:
        """Let go of the memory."""
        for numbers in self._numbers:
            numbers.release()
        self._areas, self._numbers, self._peers = [], [], []
        self._views.clear()
        if self._segment is not None:
            self._segment.close()


def message_bytes(sizes: Sequence[int]) -> tuple[int, list[int]]:
    """How many bytes of a lane a message takes whose buffers have these sizes, and where each begins."""
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += _padded(size)
    return at, starts


def lane_limit(size: int) -> int:
    """The largest message, in bytes, of one of `size` ranks."""
    return max(_LINE, min(_MOST_BYTES, _TOGETHER_BYTES // size // _LINE * _LINE))


def lane_bytes(size: int) -> int:
    """Bytes of shared memory for a lane of `size` ranks."""
    return size * (_LINE * (1 + _SLOTS) + _SLOTS * lane_limit(size))


def open_shared_lane(group: Transport, directory: str) -> Lane:
    """A lane of all ranks of a group on one host; collective. Raises SharedMemoryError if there is no memory for it."""
    total = lane_bytes(group.size)
    return Lane(group.rank, group.size, open_segment(group, [total] + [0] * (group.size - 1), directory))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
