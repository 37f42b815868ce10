"""Small collectives of the ranks of one host: each writes its numbers to its slot, and reads those of all others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buffer import STORAGE, Buffer, Op
from hvdkit.transport.polling import Backoff, calls
from hvdkit.transport.shared.flags import Flags, flag_bytes
from hvdkit.transport.shared.segment import open_segment

_LINE = 64
_MOST_BYTES = 64 * 1024  # of a slot; larger buffers are reduced as fast in shards
_TOGETHER_BYTES = 512 * 1024  # of the slots of all ranks: each rank reads all of them
_VIEWS = 256  # views of slots that are kept


class Slots:
    """The slots of a group on one host; made and closed by all its ranks together.

    Collective n uses slot n % 2 of each rank, and ends on a rank when it has read those of all. A rank writes slot
    n % 2 again in collective n + 2, which it begins when all ranks have begun n + 1. By then all have ended n: so two
    slots and one number a rank, of the last collective begun, are enough.

    limit: bytes of a slot. check: called now and then while waiting; raises RankLostError if a peer has ended.
    """

    def __init__(self, group: Transport, directory: str, check: Callable[[], None]) -> None:
        self.limit = slot_bytes(group.size)
        self._rank, self._size, self._check = group.rank, group.size, check
        flags = flag_bytes(group.size, 1)
        self._segment = open_segment(group, [flags + 2 * self.limit * group.size] + [0] * (group.size - 1), directory)
        self._begun = Flags(self._segment.memory[:flags], rank=group.rank, ranks=group.size, count=1)
        self._slots = self._segment.memory[flags:]
        self._number = 0
        self._views: dict[tuple[int, int, str], list[Buffer]] = {}

    def allreduce(self, buffer: Buffer, op: Op, scale: float, arithmetic: Arithmetic) -> None:
        """Replace `buffer` (n,) by scale * the reduction over all ranks; the same bits on all of them."""
        arithmetic.combine(buffer, self._exchange(buffer, arithmetic, -1), op, scale)

    def broadcast(self, buffer: Buffer, root: int, arithmetic: Arithmetic) -> None:
        """Fill `buffer` (n,) with the root's."""
        slots = self._exchange(buffer, arithmetic, root)
        if root != self._rank:
            arithmetic.copy(buffer, slots[root])

    def _exchange(self, buffer: Buffer, arithmetic: Arithmetic, root: int) -> list[Buffer]:
        """Every rank's slot, once all have written theirs; the root alone writes, if there is one."""
        calls().begun += 1
        self._number += 1
        slots = self._see(buffer)
        if root in (-1, self._rank):
            arithmetic.copy(slots[self._rank], buffer)
        self._begun.show(0, self._number)
        if not self._begun.everyone(0, self._number):
            backoff = Backoff(self._check)
            try:
                while not self._begun.everyone(0, self._number):
                    backoff.pause()
            except BaseException:
                calls().uncertain = True
                raise
        return slots

    def _see(self, buffer: Buffer) -> list[Buffer]:
        """The slots of this collective as numbers like the buffer's."""
        key = (self._number % 2, buffer.array.size, buffer.dtype)
        slots = self._views.get(key)
        if slots is None:
            storage = STORAGE[buffer.dtype]
            starts = [(2 * rank + key[0]) * self.limit for rank in range(self._size)]
            slots = [Buffer(self._slots[at : at + buffer.nbytes].view(storage), buffer.dtype) for at in starts]
            if len(self._views) < _VIEWS:
                self._views[key] = slots
        return slots

    def close(self) -> None:
        """Let go of the memory."""
        self._begun.close()
        self._views.clear()
        self._slots = np.empty(0, np.uint8)
        self._segment.close()


def slot_bytes(size: int) -> int:
    """The largest buffer, in bytes, that goes through the slots of `size` ranks."""
    return max(_LINE, min(_MOST_BYTES, _TOGETHER_BYTES // size // _LINE * _LINE))
