"""A mailbox of the ranks of one host, with two ring buffers in shared memory between rank 0 and each other rank.

A ring does not use the steps of steps.py: it is a queue of one writer and one reader, in which a message may wait until
the reader has time, whereas all ranks pass a step together.
"""

from __future__ import annotations

import itertools
import struct

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.shared.segment import Segment, open_segment
from hvdkit.transport.shared.steps import order

_LINE = 64  # bytes of a cache line
_LENGTH = struct.Struct("<q")


class Ring:
    """A stream of messages from one process to another.

    Memory: bytes written | bytes read | the ring of bytes. Only the writer stores the first number, after the bytes
    that it counts; only the reader stores the second number. Each number has its own cache line. A message is its
    length as int64 and its bytes. Bytes that do not fit wait in the writer's own memory, so the ring may be smaller
    than a message.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._numbers = memory[: 2 * _LINE].data.cast("q")
        self._bytes = memory[2 * _LINE :].data
        self._room = len(self._bytes)
        self._written = self._read = 0
        self.unsent = bytearray()
        self._part = b""  # the beginning of an incomplete message

    def write(self, message: bytes) -> None:
        """Send a message."""
        data = _LENGTH.pack(len(message)) + message
        if self.unsent:
            self.unsent += data
        else:
            count = self._put(data)
            if count < len(data):
                self.unsent += data[count:]

    def flush(self) -> None:
        """Write waiting bytes to the ring, as many as fit."""
        del self.unsent[: self._put(self.unsent)]

    def _put(self, data: bytes | bytearray) -> int:
        """Write as much of the data as fits; return the number of bytes written."""
        count = min(len(data), self._room - (self._written - self._numbers[_LINE // 8]))
        order()  # the reader's reads come before these writes
        at = self._written % self._room
        first = min(count, self._room - at)
        self._bytes[at : at + first] = data[:first]
        if first < count:
            self._bytes[: count - first] = data[first:count]
        order()
        self._written += count
        self._numbers[0] = self._written
        return count

    def read(self) -> list[bytes]:
        """Return the messages that have arrived completely."""
        count = self._numbers[0] - self._read
        if not count:
            return []
        order()
        at = self._read % self._room
        data = self._part + bytes(self._bytes[at : at + count])
        if at + count > self._room:
            data += bytes(self._bytes[: at + count - self._room])
        order()
        self._read += count
        self._numbers[_LINE // 8] = self._read
        messages, at = [], 0
        while at + 8 <= len(data):
            end = at + 8 + _LENGTH.unpack_from(data, at)[0]
            if end > len(data):
                break
            messages.append(data[at + 8 : end])
            at = end
        self._part = data[at:]
        return messages

    def close(self) -> None:
        """Release the memory."""
        self._numbers.release()
        self._bytes.release()


class SharedMailbox:
    """See Mailbox; all ranks of a group on one host make and close it together.

    incoming: the rings from other ranks, by rank.
    outgoing: the rings to other ranks, by rank.
    """

    star = True

    def __init__(
        self, rank: int, incoming: dict[int, Ring], outgoing: dict[int, Ring], segment: Segment | None = None
    ) -> None:
        self._rank, self._incoming, self._outgoing, self._segment = rank, incoming, outgoing, segment
        self._to_itself: list[tuple[int, bytes]] = []
        self._unsent: set[Ring] = set()

    def send(self, rank: int, message: bytes) -> None:
        if rank == self._rank:
            self._to_itself.append((rank, message))
            return
        if rank not in self._outgoing:
            raise TransportError(f"rank {self._rank} cannot send to rank {rank}: messages go to and from rank 0 only")
        ring = self._outgoing[rank]
        ring.write(message)
        if ring.unsent:
            self._unsent.add(ring)

    def receive(self) -> list[tuple[int, bytes]]:
        for ring in list(self._unsent):
            ring.flush()
            if not ring.unsent:
                self._unsent.discard(ring)
        messages, self._to_itself = self._to_itself, []
        for rank, ring in self._incoming.items():
            for message in ring.read():
                messages.append((rank, message))
        return messages

    def close(self, *, idle: bool = True) -> None:
        for ring in itertools.chain(self._incoming.values(), self._outgoing.values()):
            ring.close()
        self._incoming, self._outgoing = {}, {}
        self._unsent.clear()
        if self._segment is not None:
            self._segment.close()


def ring_bytes(size: int) -> int:
    """Return the bytes of each ring among `size` ranks: 64 KiB, or less if all rings would exceed 4 MiB."""
    return max(_LINE * 16, min(2**16, 2**22 // (2 * size) // _LINE * _LINE))


def open_shared_mailbox(group: Transport, directory: str) -> SharedMailbox:
    """Open a mailbox of all ranks of a group on one host; collective. Raises SharedMemoryError if memory is missing."""
    each = ring_bytes(group.size)
    segment = open_segment(group, [2 * (group.size - 1) * each] + [0] * (group.size - 1), directory)
    rings = {}
    for peer in range(1, group.size):
        start = 2 * (peer - 1) * each
        rings[peer] = (segment.memory[start : start + each], segment.memory[start + each : start + 2 * each])
    if group.rank == 0:
        incoming = {peer: Ring(up) for peer, (up, _) in rings.items()}
        return SharedMailbox(0, incoming, {peer: Ring(down) for peer, (_, down) in rings.items()}, segment)
    up, down = rings[group.rank]
    return SharedMailbox(group.rank, {0: Ring(down)}, {0: Ring(up)}, segment)
