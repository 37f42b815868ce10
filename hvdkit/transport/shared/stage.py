"""Large allreduces of the ranks of one host: each rank reduces its shard of a piece, and hands it out to the others.

The way of a piece is that of a bucket (buckets.py has the picture, and why cache lines move as they do): all but the
own shard goes to this rank's memory; its own shard is reduced in place from the others' memories, and the result is
written there; what the others have written is taken out. No rank touches another one's memory once it has shown that
its shard is reduced, so one memory a rank and two numbers are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import STORAGE, Array, Buffer, Op
from hvdkit.transport.polling import Backoff, calls
from hvdkit.transport.shared.buckets import plan_shards
from hvdkit.transport.shared.flags import Flags, flag_bytes
from hvdkit.transport.shared.segment import open_segment

_STAGE_BYTES = 2 * 2**20  # stays in the last-level cache between copy, sum and copy
_LAYOUTS = 64  # that are kept
_READY, _REDUCED = 0, 1


class _Layout(NamedTuple):
    """What a piece of so many elements has where.

    own: this rank's shard. foreign: all else, of this rank's memory, with where it belongs. below, above: the own shard
    in the memories of the ranks before and after this one.
    """

    own: slice
    foreign: tuple[tuple[slice, Array], ...]
    below: tuple[Buffer, ...]
    above: tuple[Buffer, ...]


class Stage:
    """The memory of a group on one host; made and closed by all its ranks together.

    check: called now and then while waiting; raises RankLostError if a peer has ended.
    """

    def __init__(self, group: Transport, directory: str, check: Callable[[], None]) -> None:
        self._rank, self._size, self._check = group.rank, group.size, check
        flags = flag_bytes(group.size, 2)
        parts = [_STAGE_BYTES + (0 if rank else flags) for rank in range(group.size)]
        self._segment = open_segment(group, parts, directory)
        self._flags = Flags(self._segment.memory[:flags], rank=group.rank, ranks=group.size, count=2)
        self._memory = self._segment.memory[flags:].reshape(group.size, _STAGE_BYTES)
        self._number = 0
        self._layouts: dict[tuple[str, int], _Layout] = {}

    def allreduce(self, buffer: Buffer, op: Op, scale: float, arithmetic: Arithmetic) -> None:
        """Replace `buffer` (n,) by scale * the reduction over all ranks; the same bits on all of them."""
        calls().begun += 1
        array = buffer.array
        step = _STAGE_BYTES // array.itemsize
        try:
            for at in range(0, array.size, step):
                self._reduce(array[at : at + step], buffer.dtype, op, scale, arithmetic)
        except BaseException:
            calls().uncertain = True
            raise

    def _reduce(self, piece: Array, dtype: str, op: Op, scale: float, arithmetic: Arithmetic) -> None:
        layout = self._layouts.get((dtype, piece.size)) or self._lay_out(dtype, piece.size)
        self._number += 1
        for where, memory in layout.foreign:
            memory[:] = piece[where]
        self._show_and_wait(_READY)
        own = Buffer(piece[layout.own], dtype)
        if own.array.size:
            arithmetic.combine(own, [*layout.below, own, *layout.above], op, scale)
            for peer in layout.below + layout.above:
                peer.array[:] = own.array
        self._show_and_wait(_REDUCED)
        for where, memory in layout.foreign:
            piece[where] = memory

    def _show_and_wait(self, index: int) -> None:
        self._flags.show(index, self._number)
        if not self._flags.everyone(index, self._number):
            backoff = Backoff(self._check)
            while not self._flags.everyone(index, self._number):
                backoff.pause()

    def _lay_out(self, dtype: str, count: int) -> _Layout:
        storage = STORAGE[dtype]
        start, stop = plan_shards(BucketSpec(dtype, count), self._size)[self._rank]
        views = self._memory[:, : count * storage.itemsize].view(storage)
        foreign = [(part, views[self._rank, part]) for part in (slice(start), slice(stop, count))]
        shards = [Buffer(view[start:stop], dtype) for view in views]
        layout = _Layout(
            slice(start, stop),
            tuple((part, memory) for part, memory in foreign if memory.size),
            tuple(shards[: self._rank]),
            tuple(shards[self._rank + 1 :]),
        )
        if len(self._layouts) < _LAYOUTS:
            self._layouts[dtype, count] = layout
        return layout

    def close(self) -> None:
        """Let go of the memory."""
        self._flags.close()
        self._layouts.clear()
        self._memory = np.empty((0, 0), np.uint8)
        self._segment.close()
