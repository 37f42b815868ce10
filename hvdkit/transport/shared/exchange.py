"""Large copies between the ranks of one host: each writes what others need to its memory, and reads theirs.

All-gather, reduce-scatter, broadcast, all-to-all, gather and scatter go in steps of a piece that stays in the
last-level cache; each byte is copied in once, and out (or into a sum) once. The protocol is that of Slots: step n uses
half n % 2 of every rank's memory, and ends on a rank when it has read what it needs. A rank writes that half again in
step n + 2, which it begins when all have begun n + 1, and so have ended n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buffer import STORAGE, Array, Buffer, Op
from hvdkit.transport.polling import Backoff, calls
from hvdkit.transport.shared.flags import Flags, flag_bytes
from hvdkit.transport.shared.segment import open_segment

_LINE = 64
_TOGETHER_BYTES = 4 * 2**20  # both halves of all ranks
_MOST_BYTES = 2**20  # a half of one rank


class Exchange:
    """The memory of a group on one host; made by all its ranks together.

    Buffers of one call agree in dtype. check: called now and then while waiting; raises RankLostError if a peer has
    ended. After an error it is not used again.
    """

    def __init__(self, group: Transport, directory: str, check: Callable[[], None]) -> None:
        self._rank, self._size, self._check = group.rank, group.size, check
        self._peers = [(group.rank + turn) % group.size for turn in range(1, group.size)]
        self._room = room_bytes(group.size)
        flags = flag_bytes(group.size, 1)
        parts = [2 * self._room + (0 if rank else flags) for rank in range(group.size)]
        self._segment = open_segment(group, parts, directory)
        self._begun = Flags(self._segment.memory[:flags], rank=group.rank, ranks=group.size, count=1)
        halves = self._segment.memory[flags:].reshape(group.size, 2, self._room)
        #: By half and rank.
        self._memory = [[halves[rank, half] for rank in range(group.size)] for half in range(2)]
        self._number = 0

    def allgather(self, pieces: Sequence[Buffer], buffer: Buffer) -> None:
        """Fill `pieces`, one a rank, with every rank's `buffer`; that may be this rank's piece."""
        own, outs = _bytes(buffer), [_bytes(piece) for piece in pieces]
        self._share(own, outs, range(self._size))
        if own.size and own.ctypes.data != outs[self._rank].ctypes.data:
            outs[self._rank][:] = own

    def gather(self, pieces: Sequence[Buffer], buffer: Buffer, root: int) -> None:
        """Fill the root's `pieces`, one a rank, with every rank's `buffer` (n,); none on other ranks."""
        own = _bytes(buffer)
        outs = [_bytes(piece) for piece in pieces] or [own] * self._size
        self._share(own, outs, (root,))
        if self._rank == root:
            outs[root][:] = own

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Fill `buffer` (n,) with the root's."""
        data = _bytes(buffer)
        calls().begun += 1
        for at in range(0, data.size, self._room):
            memory, piece = self._next(), data[at : at + self._room]
            if self._rank == root:
                memory[root][: piece.size] = piece
            self._meet()
            if self._rank != root:
                piece[:] = memory[root][: piece.size]

    def _share(self, own: Array, outs: Sequence[Array], readers: Sequence[int]) -> None:
        """Give this rank's bytes to all readers, which put those of rank r in outs[r]."""
        calls().begun += 1
        for at in range(0, max(out.size for out in outs), self._room):
            memory, piece = self._next(), own[at : at + self._room]
            if any(reader != self._rank for reader in readers):
                memory[self._rank][: piece.size] = piece
            self._meet()
            if self._rank in readers:
                for peer in self._peers:
                    out = outs[peer][at : at + self._room]
                    out[:] = memory[peer][: out.size]

    def reducescatter(
        self, out: Buffer, pieces: Sequence[Buffer], op: Op, scale: float, arithmetic: Arithmetic
    ) -> None:
        """out (n,) = scale * the reduction of every rank's pieces[this rank] (n,); it may be this rank's piece."""
        calls().begun += 1
        storage = STORAGE[out.dtype]
        room = self._room // self._size // _LINE * _LINE  # of what is for one rank
        step = room // storage.itemsize
        for at in range(0, max(piece.count for piece in pieces), step):
            memory = self._next()
            for peer in self._peers:
                part = _bytes(pieces[peer].slice(at, at + step))
                memory[self._rank][peer * room : peer * room + part.size] = part
            self._meet()
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
        """Send sent[r] to rank r; what rank r sends comes to received[r].

        Ranks know of their own pieces only, so that the number of steps is the largest that one of them says in the
        first step, in the first bytes of its memory.
        """
        calls().begun += 1
        ins, outs = [_bytes(piece) for piece in sent], [_bytes(piece) for piece in received]
        room = (self._room - _LINE) // self._size // _LINE * _LINE
        moved = [*(ins[peer] for peer in self._peers), *(outs[peer] for peer in self._peers)]
        steps = max(1, *(-(-piece.size // room) for piece in moved))
        step = 0
        while step < steps:
            memory, at = self._next(), step * room
            memory[self._rank][:8].view(np.int64)[0] = steps
            for peer in self._peers:
                part, start = ins[peer][at : at + room], _LINE + peer * room
                memory[self._rank][start : start + part.size] = part
            self._meet()
            steps = max(steps, *(int(memory[peer][:8].view(np.int64)[0]) for peer in self._peers))
            start = _LINE + self._rank * room
            for peer in self._peers:
                part = outs[peer][at : at + room]
                part[:] = memory[peer][start : start + part.size]
            step += 1
        outs[self._rank][:] = ins[self._rank]

    def scatter(self, out: Buffer, pieces: Sequence[Buffer], root: int) -> None:
        """Fill every rank's `out` (n,) with the root's piece for it; `pieces` is empty on other ranks."""
        calls().begun += 1
        room = self._room // self._size // _LINE * _LINE
        target, ins = _bytes(out), [_bytes(piece) for piece in pieces]
        for at in range(0, target.size, room):
            memory = self._next()
            if self._rank == root:
                for peer in self._peers:
                    part = ins[peer][at : at + room]
                    memory[root][peer * room : peer * room + part.size] = part
            self._meet()
            if self._rank != root:
                part = target[at : at + room]
                part[:] = memory[root][self._rank * room : self._rank * room + part.size]
        if self._rank == root:
            target[:] = ins[root]

    def _next(self) -> list[Array]:
        """Begin a step: every rank's memory for it."""
        self._number += 1
        return self._memory[self._number % 2]

    def _meet(self) -> None:
        """Wait until all ranks have written what they give in this step."""
        self._begun.show(0, self._number)
        if not self._begun.everyone(0, self._number):
            backoff = Backoff(self._check)
            try:
                while not self._begun.everyone(0, self._number):
                    backoff.pause()
            except BaseException:
                calls().uncertain = True
                raise

    def close(self) -> None:
        """Let go of the memory."""
        self._begun.close()
        self._memory = []
        self._segment.close()


def _bytes(buffer: Buffer) -> Array:
    return buffer.array.view(np.uint8)


def room_bytes(size: int) -> int:
    """The bytes that each of `size` ranks gives away in a step."""
    most = min(_MOST_BYTES, _TOGETHER_BYTES // (2 * size))
    return max(_LINE * (size + 1), most // _LINE * _LINE)
