"""Connections between all pairs of ranks, which carry messages and show all ranks when a rank ends.

A frame is the 16 bytes of its mailbox's channel, 8 bytes of length, and the message. No call here blocks: bytes that
cannot be sent at once are sent by a later call.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hvdkit.errors import RankLostError
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.polling import calls
from hvdkit.transport.request import Request, check_size, closed_meanwhile
from hvdkit.world import describe_death, describe_leaving

_HEAD = struct.Struct("<16sQ")
_PEER = _TAG = struct.Struct("<I")
_LEAVING = b"leaving".ljust(16, b"\0")
_GONE = b"gone".ljust(16, b"\0")
_PIECE = 256 * 1024

# Messages that a rank sent before it ended may still pass through other threads, and may be all that a wait needs.
_DEATH_GRACE_S = 1.0
_LEAVING_GRACE_S = 5.0

_FLUSH_S = 2.0


class PeerConnections:
    """This rank's connections; any thread may call the methods.

    connections: a socket to each other rank, by rank. hosts: name of every rank's host, by rank.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], hosts: Sequence[str]) -> None:
        self.rank, self.hosts = rank, tuple(hosts)
        self._connections = dict(connections)
        self._by_descriptor = {connection.fileno(): peer for peer, connection in self._connections.items()}
        self._poll = select.poll()
        for connection in self._connections.values():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
        self._outgoing: defaultdict[int, bytearray] = defaultdict(bytearray)
        self._incoming: defaultdict[int, bytearray] = defaultdict(bytearray)
        self._messages: defaultdict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
        self._closed: set[bytes] = set()
        self._gone: dict[int, tuple[bool, float]] = {}  # in the order of detection: (announced by the rank, time)
        self._lock = threading.RLock()
        _open.add(self)

    def send(self, peer: int, channel: bytes, message: bytes) -> None:
        """Send, and return at once; a message to a rank that has ended is lost. channel: 16 bytes."""
        with self._lock:
            if peer == self.rank:
                self._messages[channel].append((peer, message))
            elif peer in self._connections:
                outgoing = self._outgoing[peer]
                outgoing += _HEAD.pack(channel, len(message))
                outgoing += message
                self._flush(peer)

    def receive(self, channel: bytes) -> list[tuple[int, bytes]]:
        """Return all messages that have arrived for this channel, as (sender, message)."""
        with self._lock:
            self._turn()
            return self._messages.pop(channel, [])

    def is_sent(self, peer: int) -> bool:
        """Return whether the kernel has taken all messages to this rank, after another try; False if it has ended."""
        with self._lock:
            if self._outgoing.get(peer):
                self._flush(peer)
            return peer in self._connections and not self._outgoing.get(peer)

    def close_channel(self, channel: bytes) -> None:
        """Drop all present and future messages for this channel, which must not be used again."""
        with self._lock:
            self._messages.pop(channel, None)
            self._closed.add(channel)

    def check(self, ranks: Iterable[int], *, at_once: bool = False) -> None:
        """Raise RankLostError if one of these ranks has ended, and a grace period for its last messages is over.

        at_once: without the grace period, if the caller knows that the rank did not answer.
        """
        with self._lock:
            self._turn()
            among = set(ranks)
            for peer, (said, when) in self._gone.items():
                grace = 0.0 if at_once else _LEAVING_GRACE_S if said else _DEATH_GRACE_S
                if peer in among and time.monotonic() - when >= grace:
                    if said:
                        raise RankLostError(describe_leaving(peer, self.hosts[peer], self.rank))
                    raise RankLostError(describe_death(peer, self.hosts[peer]))

    def leave(self) -> None:
        """Announce to all ranks that this rank leaves."""
        with self._lock:
            self._tell(_LEAVING, b"")
            deadline = time.monotonic() + _FLUSH_S
            while any(self._outgoing.values()) and time.monotonic() < deadline:
                self._turn()
                time.sleep(0.001)

    def close(self) -> None:
        """Leave, and close the connections; closing twice is harmless."""
        self.leave()
        with self._lock:
            self.forget()

    def forget(self) -> None:
        """Close this process's descriptors, as a forked child must: they would keep a dead rank's connections open."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._by_descriptor.clear()
        self._poll = select.poll()

    def _turn(self) -> None:
        """Read all arrived bytes, and send the remaining bytes."""
        for peer in [peer for peer, data in self._outgoing.items() if data]:
            self._flush(peer)
        for descriptor, _ in self._poll.poll(0):
            if descriptor in self._by_descriptor:
                self._read(self._by_descriptor[descriptor])

    def _read(self, peer: int) -> None:
        connection, data = self._connections[peer], self._incoming[peer]
        ended = False
        while True:
            try:
                piece = connection.recv(_PIECE)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            if not piece:
                ended = True
                break
            data += piece
            if len(piece) < _PIECE:
                break
        self._take_frames(peer, data)
        if ended:
            self._drop(peer)

    def _take_frames(self, peer: int, data: bytearray) -> None:
        at = 0
        while len(data) - at >= _HEAD.size:
            channel, length = _HEAD.unpack_from(data, at)
            if len(data) - at - _HEAD.size < length:
                break
            with memoryview(data) as view:
                message = bytes(view[at + _HEAD.size : at + _HEAD.size + length])
            at += _HEAD.size + length
            if channel == _LEAVING:
                self._gone.setdefault(peer, (True, time.monotonic()))
            elif channel == _GONE:
                self._notice_death(_PEER.unpack(message)[0])
            elif channel not in self._closed:
                self._messages[channel].append((peer, message))
        del data[:at]

    def _flush(self, peer: int) -> None:
        data = self._outgoing[peer]
        connection = self._connections.get(peer)
        try:
            while data and connection is not None:
                del data[: connection.send(data)]
        except BlockingIOError:
            pass
        except OSError:
            data.clear()  # _read() detects the end, after the peer's last messages

    def _drop(self, peer: int) -> None:
        connection = self._connections.pop(peer)
        del self._by_descriptor[connection.fileno()]
        self._poll.unregister(connection)
        connection.close()
        self._outgoing.pop(peer, None)
        self._notice_death(peer)

    def _notice_death(self, peer: int) -> None:
        if peer in self._gone or peer == self.rank:
            return
        self._gone[peer] = (False, time.monotonic())
        # A rank that ends because of this loss must not be taken for the first lost rank.
        self._tell(_GONE, _PEER.pack(peer))

    def _tell(self, channel: bytes, message: bytes) -> None:
        for peer in list(self._connections):
            self.send(peer, channel, message)


class PeerMailbox:
    """See Mailbox. ranks: the number among `peers` of each rank. channel: 16 bytes that no other mailbox uses."""

    star = False

    def __init__(self, peers: PeerConnections, ranks: Sequence[int], channel: bytes) -> None:
        self._peers, self._ranks, self._channel = peers, tuple(ranks), channel
        self._numbers = {peer: rank for rank, peer in enumerate(ranks)}

    def send(self, rank: int, message: bytes) -> None:
        self._peers.send(self._ranks[rank], self._channel, message)

    def receive(self) -> list[tuple[int, bytes]]:
        return [(self._numbers[peer], message) for peer, message in self._peers.receive(self._channel)]

    def close(self, *, idle: bool = True) -> None:
        self._peers.close_channel(self._channel)

    def is_sent(self, rank: int) -> bool:
        """Return whether the kernel has taken all messages to this rank."""
        return self._peers.is_sent(self._ranks[rank])

    def check(self, rank: int) -> None:
        """Raise RankLostError if this rank is known to have ended."""
        self._peers.check([self._ranks[rank]])


class PeerMessages:
    """Sends and receives the tagged messages of a group over a mailbox, which close() closes."""

    def __init__(self, mailbox: PeerMailbox) -> None:
        self.mailbox, self._closed = mailbox, False
        self._receives: defaultdict[tuple[int, int], deque[_Receive]] = defaultdict(deque)
        self._arrived: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)

    def send(self, buffer: Buffer, peer: int, tag: int) -> Request:
        """See Transport.isend. The request is done when the kernel has taken the message."""
        calls().uncertain = True
        self.mailbox.send(peer, b"".join((_TAG.pack(tag), buffer.array.data)))
        return _Send(self, buffer, peer)

    def receive(self, buffer: Buffer, peer: int, tag: int) -> Request:
        """See Transport.ireceive."""
        calls().uncertain = True
        request = _Receive(self, buffer, peer)
        self._receives[peer, tag].append(request)
        return request

    def advance(self) -> None:
        """Pass arrived messages to the requests that wait for them. Raises TransportError after close()."""
        if self._closed:
            raise closed_meanwhile()
        for peer, message in self.mailbox.receive():
            self._arrived[peer, _TAG.unpack_from(message)[0]].append(message)
        for key in [key for key in self._arrived if self._receives.get(key)]:
            messages, receives = self._arrived[key], self._receives[key]
            while messages and receives:
                receives.popleft().message = messages.popleft()
            if not messages:
                del self._arrived[key]
            if not receives:
                del self._receives[key]

    def close(self) -> None:
        """Close the mailbox. Messages not yet received are lost."""
        self._closed = True
        self.mailbox.close()
        self._receives.clear()
        self._arrived.clear()


class _Send(Request):
    def __init__(self, messages: PeerMessages, out: Buffer, peer: int) -> None:
        self.out = out
        self._messages, self._peer, self._done = messages, peer, messages.mailbox.is_sent(peer)

    def done(self) -> bool:
        if not self._done:
            self._messages.advance()  # also reads: two ranks that only send would fill each other's socket buffers
            self._done = self._messages.mailbox.is_sent(self._peer)
            if not self._done:
                self._messages.mailbox.check(self._peer)
        return self._done


class _Receive(Request):
    """A message to receive. message: the tag and the bytes, once they have arrived."""

    message: bytes | None = None

    def __init__(self, messages: PeerMessages, out: Buffer, peer: int) -> None:
        self.out = out
        self._messages, self._peer, self._done = messages, peer, False

    def done(self) -> bool:
        if self._done:
            return True
        if self.message is None:
            self._messages.advance()
            if self.message is None:
                self._messages.mailbox.check(self._peer)
                return False
        check_size(self._peer, len(self.message) - _TAG.size, self.out)
        self.out.array.view(np.uint8)[:] = np.frombuffer(self.message, np.uint8, offset=_TAG.size)
        self.message, self._done = b"", True
        return True


_open: weakref.WeakSet[PeerConnections] = weakref.WeakSet()


def _forget_all() -> None:
    for connections in list(_open):
        connections.forget()


os.register_at_fork(after_in_child=_forget_all)
