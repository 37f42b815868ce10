"""A mailbox of the ranks of one host: between rank 0 and each other rank a ring of bytes in shared memory each way."""

from __future__ import annotations

import itertools
import struct

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.shared.segment import Segment, open_segment, order

_LINE = 64  # bytes of a cache line
_LENGTH = struct.Struct("<q")


class Ring:
    """A stream of messages from one process to another.

    Memory: bytes written | bytes read | the bytes, around. The writer alone stores the first number, after the bytes
    that it counts; the reader alone stores the second one. Each is in a cache line of its own. A message is its length
    as int64 and its bytes. What finds no room waits in the writer's own memory, so the ring may be smaller than a
    message.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._numbers = memory[: 2 * _LINE].data.cast("q")
        self._bytes = memory[2 * _LINE :].data
        self._room = len(self._bytes)
        self._written = self._read = 0
        self.unsent = bytearray()
        self._part = b""  # the beginning of a message

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
        """Write what waits, as far as there is room."""
        del self.unsent[: self._put(self.unsent)]

    def _put(self, data: bytes | bytearray) -> int:
        """Write the beginning of the data; how much of it there was room for."""
        count = min(len(data), self._room - (self._written - self._numbers[_LINE // 8]))
        order()  # the reader has read what is overwritten now
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
        """The messages that have arrived as a whole."""
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
        """Let go of the memory."""
        self._numbers.release()
        self._bytes.release()


class SharedMailbox:
    """See Mailbox; made and closed by all ranks of a group on one host together.

    incoming, outgoing: the rings from and to other ranks, by rank.
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
    """Bytes of each ring among `size` ranks: 64 KiB, or less where all of them together come to more than 4 MiB."""
    return max(_LINE * 16, min(2**16, 2**22 // (2 * size) // _LINE * _LINE))


def open_shared_mailbox(group: Transport, directory: str) -> SharedMailbox:
    """A mailbox of all ranks of a group on one host; collective. Raises SharedMemoryError if there is no memory."""
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
