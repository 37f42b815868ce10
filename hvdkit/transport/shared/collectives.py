"""Collectives of the ranks of one host on arrays: each rank writes to its memory and reads the others' memory.

SmallCollectives does small ones, ChunkedAllreduce large allreduces, ChunkedExchange other large collectives. Each has
its own memory, with a part for each rank, and flags that show the progress of every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import STORAGE, Array, Buffer, Op
from hvdkit.transport.polling import Backoff, calls
from hvdkit.transport.shared.buckets import plan_shards
from hvdkit.transport.shared.segment import Flags, flag_bytes, open_segment

_LINE = 64  # bytes of a cache line

_MOST_SLOT_BYTES = 64 * 1024  # larger buffers are reduced as fast in shards
_SLOTS_BYTES = 512 * 1024  # limit for the slots of all ranks, because each rank reads all of them
_VIEWS = 256  # limit of cached views of slots

STAGE_BYTES = 2 * 2**20  # stays in the last-level cache between copy, sum and copy
_LAYOUTS = 64  # limit of cached layouts
_READY, _REDUCED = 0, 1

_EXCHANGE_BYTES = 4 * 2**20  # both halves of all ranks
_MOST_ROOM_BYTES = 2**20  # limit of one half of one rank


class _Memory:
    """Memory of a group on one host, with a part for each rank; all its ranks make and close it together.

    nbytes: bytes of a part. flags: number of flags of each rank. check: called now and then in waits; raises
    RankLostError if a peer has ended.
    """

    def __init__(self, group: Transport, directory: str, check: Callable[[], None], nbytes: int, flags: int) -> None:
        self._rank, self._size, self._check = group.rank, group.size, check
        start = flag_bytes(group.size, flags)
        parts = [nbytes + (0 if rank else start) for rank in range(group.size)]
        self._segment = open_segment(group, parts, directory)
        self._flags = Flags(self._segment.memory[:start], rank=group.rank, ranks=group.size, count=flags)
        #: (size, nbytes)
        self._parts = self._segment.memory[start:].reshape(group.size, nbytes)
        self._number = 0

    def _barrier(self, index: int = 0) -> None:
        """Wait until all ranks have reached the same step as this rank."""
        self._flags.show(index, self._number)
        if not self._flags.everyone(index, self._number):
            backoff = Backoff(self._check)
            try:
                while not self._flags.everyone(index, self._number):
                    backoff.pause()
            except BaseException:
                calls().uncertain = True
                raise

    @contextlib.contextmanager
    def _run_in_chunks(self) -> Iterator[None]:
        """Return a context for a collective of several steps, in any of which others may wait after an error."""
        calls().begun += 1
        try:
            yield
        except BaseException:  # whatever ends it, the ranks may be out of step
            calls().uncertain = True
            raise

    def close(self) -> None:
        """Release the memory."""
        self._flags.close()
        self._parts = np.empty((0, 0), np.uint8)
        self._segment.close()


class SmallCollectives(_Memory):
    """Small allreduces and broadcasts: each rank writes its numbers to its slot, and reads the slots of all others.

    Collective n uses slot n % 2 of each rank, and ends on a rank when it has read the slots of all ranks. A rank writes
    slot n % 2 again in collective n + 2, which it begins when all ranks have begun n + 1. By then all have ended n. So
    two slots and one flag for each rank, the number of the last collective begun, are enough.

    limit: bytes of a slot.
    """

    def __init__(self, group: Transport, directory: str, check: Callable[[], None]) -> None:
        self.limit = slot_bytes(group.size)
        super().__init__(group, directory, check, 2 * self.limit, 1)
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
        """Return every rank's slot, after all have written; only `root` writes, unless it is -1."""
        calls().begun += 1
        self._number += 1
        slots = self._see(buffer)
        if root in (-1, self._rank):
            arithmetic.copy(slots[self._rank], buffer)
        self._barrier()
        return slots

    def _see(self, buffer: Buffer) -> list[Buffer]:
        """Return the slots of this collective as buffers with the count and dtype of `buffer`."""
        key = (self._number % 2, buffer.array.size, buffer.dtype)
        slots = self._views.get(key)
        if slots is None:
            where = slice(key[0] * self.limit, key[0] * self.limit + buffer.nbytes)
            slots = [Buffer(part[where].view(STORAGE[buffer.dtype]), buffer.dtype) for part in self._parts]
            if len(self._views) < _VIEWS:
                self._views[key] = slots
        return slots

    def close(self) -> None:
        """Release the memory."""
        self._views.clear()
        super().close()


def slot_bytes(size: int) -> int:
    """Return the largest number of bytes of a buffer for the slots of `size` ranks."""
    return max(_LINE, min(_MOST_SLOT_BYTES, _SLOTS_BYTES // size // _LINE * _LINE))


class _Layout(NamedTuple):
    """The layout of a segment with a given number of elements.

    own: this rank's shard. foreign: the other elements in this rank's memory, with their ranges. below, above: this
    rank's shard in the memories of the lower and higher ranks.
    """

    own: slice
    foreign: tuple[tuple[slice, Array], ...]
    below: tuple[Buffer, ...]
    above: tuple[Buffer, ...]


class ChunkedAllreduce(_Memory):
    """Large allreduces: each rank reduces its shard of a segment, and copies the result to the others.

    A segment goes the same way as a bucket (see buckets.py for the picture and the use of cache lines): a rank copies
    all elements but its own shard to its memory, reduces its own shard in place from the others' memories, writes the
    result there, and copies the others' results out. A rank that has shown that its shard is reduced does not touch
    another rank's memory any more, so one memory and two flags for each rank are enough.
    """

    def __init__(self, group: Transport, directory: str, check: Callable[[], None]) -> None:
        super().__init__(group, directory, check, STAGE_BYTES, 2)
        self._layouts: dict[tuple[str, int], _Layout] = {}

    def allreduce(self, buffer: Buffer, op: Op, scale: float, arithmetic: Arithmetic) -> None:
        """Replace `buffer` (n,) by scale * the reduction over all ranks; the same bits on all of them."""
        array = buffer.array
        step = STAGE_BYTES // array.itemsize
        with self._run_in_chunks():
            for at in range(0, array.size, step):
                self._reduce(array[at : at + step], buffer.dtype, op, scale, arithmetic)

    def _reduce(self, piece: Array, dtype: str, op: Op, scale: float, arithmetic: Arithmetic) -> None:
        layout = self._layouts.get((dtype, piece.size)) or self._lay_out(dtype, piece.size)
        self._number += 1
        for where, memory in layout.foreign:
            memory[:] = piece[where]
        self._barrier(_READY)
        own = Buffer(piece[layout.own], dtype)
        if own.array.size:
            arithmetic.combine(own, [*layout.below, own, *layout.above], op, scale)
            for peer in layout.below + layout.above:
                peer.array[:] = own.array
        self._barrier(_REDUCED)
        for where, memory in layout.foreign:
            piece[where] = memory

    def _lay_out(self, dtype: str, count: int) -> _Layout:
        storage = STORAGE[dtype]
        start, stop = plan_shards(BucketSpec(dtype, count), self._size)[self._rank]
        views = self._parts[:, : count * storage.itemsize].view(storage)
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
        """Release the memory."""
        self._layouts.clear()
        super().close()


class ChunkedExchange(_Memory):
    """Other large collectives: each rank writes the data for others to its memory, and reads theirs.

    They go in steps of a segment that stays in the last-level cache; each byte is copied in once, and out (or into a
    sum) once. The protocol is that of SmallCollectives: step n uses half n % 2 of every rank's memory, and
    ends on a rank when it has read the data that it needs. A rank writes that half again in step n + 2, which it begins
    when all have begun n + 1, and so have ended n.

    Buffers of one call have the same dtype. After an error the object must not be used again.
    """

    def __init__(self, group: Transport, directory: str, check: Callable[[], None]) -> None:
        self._room = room_bytes(group.size)
        super().__init__(group, directory, check, 2 * self._room, 1)
        self._peers = [(group.rank + turn) % group.size for turn in range(1, group.size)]
        #: By half and rank.
        self._halves = [[part[at : at + self._room] for part in self._parts] for at in (0, self._room)]

    def allgather(self, pieces: Sequence[Buffer], buffer: Buffer) -> None:
        """Fill `pieces`, one for each rank, with every rank's `buffer`, which may be pieces[rank] itself."""
        own, outs = _bytes(buffer), [_bytes(piece) for piece in pieces]
        self._share(own, outs, range(self._size))
        if own.size and own.ctypes.data != outs[self._rank].ctypes.data:
            outs[self._rank][:] = own

    def gather(self, pieces: Sequence[Buffer], buffer: Buffer, root: int) -> None:
        """Fill the root's `pieces`, one for each rank, with every rank's `buffer` (n,); empty on other ranks."""
        own = _bytes(buffer)
        outs = [_bytes(piece) for piece in pieces] or [own] * self._size
        self._share(own, outs, (root,))
        if self._rank == root:
            outs[root][:] = own

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Fill `buffer` (n,) with the root's."""
        data, nothing = _bytes(buffer), np.empty(0, np.uint8)
        outs = [data if rank == root else nothing for rank in range(self._size)]
        self._share(outs[self._rank], outs, range(self._size))

    def _share(self, own: Array, outs: Sequence[Array], readers: Sequence[int]) -> None:
        """Send this rank's bytes to all readers, which write the bytes of rank r to outs[r]."""
        with self._run_in_chunks():
            for at in range(0, max(out.size for out in outs), self._room):
                memory, piece = self._next(), own[at : at + self._room]
                if any(reader != self._rank for reader in readers):
                    memory[self._rank][: piece.size] = piece
                self._barrier()
                if self._rank in readers:
                    for peer in self._peers:
                        out = outs[peer][at : at + self._room]
                        out[:] = memory[peer][: out.size]

    def reducescatter(
        self, out: Buffer, pieces: Sequence[Buffer], op: Op, scale: float, arithmetic: Arithmetic
    ) -> None:
        """Set out (n,) to scale * the reduction of every rank's pieces[rank] (n,).

        out: may be pieces[rank] itself.
        pieces: one for each rank.
        op: the reduction.
        scale: factor on the result.
        arithmetic: adds and scales the numbers.
        """
        with self._run_in_chunks():
            storage = STORAGE[out.dtype]
            room = self._room // self._size // _LINE * _LINE  # bytes for one rank
            step = room // storage.itemsize
            for at in range(0, max(piece.count for piece in pieces), step):
                memory = self._next()
                self._write(memory, [_bytes(piece.slice(at, at + step)) for piece in pieces], room)
                self._barrier()
                target = out.slice(at, at + step)
                if not target.count:
                    continue
                mine = slice(self._rank * room, self._rank * room + target.nbytes)
                sources = [
                    pieces[rank].slice(at, at + step)
                    if rank == self._rank
                    else Buffer(memory[rank][mine].view(storage), out.dtype)
                    for rank in range(self._size)
                ]
                arithmetic.combine(target, sources, op, scale)

    def alltoall(self, received: Sequence[Buffer], sent: Sequence[Buffer]) -> None:
        """Send sent[r] to rank r, and receive into received[r] from rank r.

        Each rank knows only its own buffers. So each writes its number of steps to the first bytes of its memory in the
        first step, and all do the largest of these numbers.
        """
        with self._run_in_chunks():
            ins, outs = [_bytes(piece) for piece in sent], [_bytes(piece) for piece in received]
            room = (self._room - _LINE) // self._size // _LINE * _LINE
            moved = [*(ins[peer] for peer in self._peers), *(outs[peer] for peer in self._peers)]
            steps = max(1, *(-(-piece.size // room) for piece in moved))
            step = 0
            while step < steps:
                memory, at = self._next(), step * room
                memory[self._rank][:8].view(np.int64)[0] = steps
                self._write(memory, [piece[at : at + room] for piece in ins], room, _LINE)
                self._barrier()
                steps = max(steps, *(int(memory[peer][:8].view(np.int64)[0]) for peer in self._peers))
                start = _LINE + self._rank * room
                for peer in self._peers:
                    part = outs[peer][at : at + room]
                    part[:] = memory[peer][start : start + part.size]
                step += 1
            outs[self._rank][:] = ins[self._rank]

    def _write(self, memory: Sequence[Array], parts: Sequence[Array], room: int, first: int = 0) -> None:
        """Write this rank's data for each peer to its memory, `room` bytes apart, from byte `first` on."""
        for peer in self._peers:
            start = first + peer * room
            memory[self._rank][start : start + parts[peer].size] = parts[peer]

    def _next(self) -> list[Array]:
        """Begin a step; return every rank's memory for it."""
        self._number += 1
        return self._halves[self._number % 2]

    def close(self) -> None:
        """Release the memory."""
        self._halves = []
        super().close()


def _bytes(buffer: Buffer) -> Array:
    return buffer.array.view(np.uint8)


def room_bytes(size: int) -> int:
    """Return the bytes that each of `size` ranks sends in a step."""
    most = min(_MOST_ROOM_BYTES, _EXCHANGE_BYTES // (2 * size))
    return max(_LINE * (size + 1), most // _LINE * _LINE)
