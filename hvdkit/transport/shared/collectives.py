"""Collectives of the ranks of one host on arrays: each rank writes to its memory and reads the others' memory.

SmallCollectives does small ones, ChunkedAllreduce large allreduces, ChunkedExchange other large collectives. All follow
the protocol of steps.py, and differ in what they move in a step. Each opens its memory when it is first used: one
memory for both large kinds would take 4 MiB a rank for the first use of either.

`hvdrun -np 2 python -m benchmarks.shared_memory` compares the ways, on an idle machine. Times of 2 ranks on 2 cores, as
ratios within one run:

| allreduce of | 4 B | 4 KiB | 16 KiB | 32 KiB | 64 KiB | 128 KiB | 512 KiB | 1 MiB | 4 MiB | 16 MiB |
|---|---|---|---|---|---|---|---|---|---|---|
| SmallCollectives | 1 | 1 | 1 | 1 | 1 | | | | | |
| ChunkedAllreduce | 1.8 | 1.6 | 1.2 | 0.9 | 0.7 | 1 | 1 | 1 | 1 | 1 |
| SharedBuckets of 2 MiB, two at a time | 3.7 | 3.3 | 2.4 | 1.8 | 1.3 | 1.6 | 1.3 | 1.2 | 1.2 | 0.9 to 1.2 |

A broadcast of 64 KiB in chunks takes 1.4 of its time in slots. With 3 ranks on these cores the limits are the same.

Neither smaller chunks nor filling a second chunk during the sum of the first is faster: at 4 MiB, chunks of 1 MiB took
1.1 of the time, and those filled ahead 1.2, because the memory that a core uses exceeds its own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import STORAGE, Array, Buffer, Op
from hvdkit.transport.polling import calls
from hvdkit.transport.shared.buckets import plan_shards
from hvdkit.transport.shared.steps import SharedSteps, several_steps

_LINE = 64  # bytes of a cache line

_MOST_SLOT_BYTES = 64 * 1024  # larger buffers are broadcast as fast in chunks
MOST_SUMMED_BYTES = 32 * 1024  # larger buffers are reduced as fast in chunks
_SLOTS_BYTES = 512 * 1024  # limit for the slots of all ranks, because each rank reads all of them
_VIEWS = 256  # limit of cached views of slots

STAGE_BYTES = 2 * 2**20  # stays in the last-level cache between copy, sum and copy
_LAYOUTS = 64  # limit of cached layouts

_EXCHANGE_BYTES = 4 * 2**20  # both halves of all ranks
_MOST_ROOM_BYTES = 2**20  # limit of one half of one rank


class SmallCollectives:
    """Small allreduces and broadcasts, in halves: a half is a slot for all of a rank's numbers, so there is one step.

    limit: bytes of a slot.
    """

    def __init__(self, group: Transport, directory: str, check: Callable[[], None]) -> None:
        self.limit = slot_bytes(group.size)
        self._rank = group.rank
        self._steps = SharedSteps(group, 2 * self.limit, directory=directory, check=check)
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
        slots = self._see(buffer)
        if root in (-1, self._rank):
            arithmetic.copy(slots[self._rank], buffer)
        self._steps.pass_step()
        return slots

    def _see(self, buffer: Buffer) -> list[Buffer]:
        """Return the slots of the next step as buffers with the count and dtype of `buffer`."""
        key = (self._steps.half, buffer.array.size, buffer.dtype)
        slots = self._views.get(key)
        if slots is None:
            halves = self._steps.halves[key[0]]
            slots = [Buffer(half[: buffer.nbytes].view(STORAGE[buffer.dtype]), buffer.dtype) for half in halves]
            if len(self._views) < _VIEWS:
                self._views[key] = slots
        return slots

    def close(self) -> None:
        """Release the memory."""
        self._views.clear()
        self._steps.close()


def slot_bytes(size: int) -> int:
    """Return the largest number of bytes of a buffer for the slots of `size` ranks."""
    return max(_LINE, min(_MOST_SLOT_BYTES, _SLOTS_BYTES // size // _LINE * _LINE))


class _Layout(NamedTuple):
    """The layout of a chunk with a given number of elements.

    own: this rank's shard. foreign: the other elements in this rank's memory, with their ranges. below, above: this
    rank's shard in the memories of the lower and higher ranks.
    """

    own: slice
    foreign: tuple[tuple[slice, Array], ...]
    below: tuple[Buffer, ...]
    above: tuple[Buffer, ...]


class ChunkedAllreduce:
    """Large allreduces: each rank reduces its shard of a chunk in place, and copies the result to the others.

    A chunk goes the same way as a bucket (see buckets.py for the picture and the use of cache lines): a rank copies all
    elements but its own shard to its memory, reduces its own shard in place from the others' memories, writes the
    result there, and copies the others' results out.
    """

    def __init__(self, group: Transport, directory: str, check: Callable[[], None]) -> None:
        self._rank, self._size = group.rank, group.size
        self._steps = SharedSteps(group, STAGE_BYTES, directory=directory, check=check)
        self._layouts: dict[tuple[str, int], _Layout] = {}

    def allreduce(self, buffer: Buffer, op: Op, scale: float, arithmetic: Arithmetic) -> None:
        """Replace `buffer` (n,) by scale * the reduction over all ranks; the same bits on all of them."""
        array = buffer.array
        step = STAGE_BYTES // array.itemsize
        with several_steps():
            for at in range(0, array.size, step):
                self._reduce(array[at : at + step], buffer.dtype, op, scale, arithmetic)

    def _reduce(self, chunk: Array, dtype: str, op: Op, scale: float, arithmetic: Arithmetic) -> None:
        layout = self._layouts.get((dtype, chunk.size)) or self._lay_out(dtype, chunk.size)
        for where, memory in layout.foreign:
            memory[:] = chunk[where]
        self._steps.pass_step()
        own = Buffer(chunk[layout.own], dtype)
        if own.array.size:
            arithmetic.combine(own, [*layout.below, own, *layout.above], op, scale)
            for peer in layout.below + layout.above:
                peer.array[:] = own.array
        self._steps.pass_step()
        for where, memory in layout.foreign:
            chunk[where] = memory

    def _lay_out(self, dtype: str, count: int) -> _Layout:
        storage = STORAGE[dtype]
        start, stop = plan_shards(BucketSpec(dtype, count), self._size)[self._rank]
        views = [memory[: count * storage.itemsize].view(storage) for memory in self._steps.memory]
        foreign = [(part, views[self._rank][part]) for part in (slice(start), slice(stop, count))]
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
        self._steps.close()


class ChunkedExchange:
    """Other large collectives, in halves: each rank writes a chunk of the data for others, and reads theirs.

    Chunks stay in the last-level cache; each byte is copied in once, and out (or into a sum) once. Buffers of one call
    have the same dtype. After an error the object must not be used again.
    """

    def __init__(self, group: Transport, directory: str, check: Callable[[], None]) -> None:
        self._rank, self._size = group.rank, group.size
        self._room = room_bytes(group.size)
        self._steps = SharedSteps(group, 2 * self._room, directory=directory, check=check)
        self._peers = [(group.rank + turn) % group.size for turn in range(1, group.size)]

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
        with several_steps():
            for at in range(0, max(out.size for out in outs), self._room):
                memory, piece = self._next(), own[at : at + self._room]
                if any(reader != self._rank for reader in readers):
                    memory[self._rank][: piece.size] = piece
                self._steps.pass_step()
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
        with several_steps():
            storage = STORAGE[out.dtype]
            room = self._room // self._size // _LINE * _LINE  # bytes for one rank
            step = room // storage.itemsize
            for at in range(0, max(piece.count for piece in pieces), step):
                memory = self._next()
                self._write(memory, [_bytes(piece.slice(at, at + step)) for piece in pieces], room)
                self._steps.pass_step()
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
        with several_steps():
            ins, outs = [_bytes(piece) for piece in sent], [_bytes(piece) for piece in received]
            room = (self._room - _LINE) // self._size // _LINE * _LINE
            moved = [*(ins[peer] for peer in self._peers), *(outs[peer] for peer in self._peers)]
            steps = max(1, *(-(-piece.size // room) for piece in moved))
            step = 0
            while step < steps:
                memory, at = self._next(), step * room
                memory[self._rank][:8].view(np.int64)[0] = steps
                self._write(memory, [piece[at : at + room] for piece in ins], room, _LINE)
                self._steps.pass_step()
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
        """Return every rank's memory for the next step."""
        return self._steps.halves[self._steps.half]

    def close(self) -> None:
        """Release the memory."""
        self._steps.close()


def _bytes(buffer: Buffer) -> Array:
    return buffer.array.view(np.uint8)


def room_bytes(size: int) -> int:
    """Return the bytes that each of `size` ranks sends in a step."""
    most = min(_MOST_ROOM_BYTES, _EXCHANGE_BYTES // (2 * size))
    return max(_LINE * (size + 1), most // _LINE * _LINE)
