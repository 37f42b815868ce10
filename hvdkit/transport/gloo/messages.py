"""Messages from rank to rank over the peer connections: no rank but the two has to do anything."""

from __future__ import annotations

import struct
from collections import defaultdict, deque

import numpy as np

from hvdkit.transport.buffer import Buffer
from hvdkit.transport.gloo.peers import PeerMailbox
from hvdkit.transport.polling import calls
from hvdkit.transport.request import Request, check_size, closed_meanwhile

_TAG = struct.Struct("<I")


class PeerMessages:
    """The messages of a group, each with its tag before it in a mailbox of its own, which close() closes."""

    def __init__(self, mailbox: PeerMailbox) -> None:
        self.mailbox, self._closed = mailbox, False
        self._receives: defaultdict[tuple[int, int], deque[_Receive]] = defaultdict(deque)
        self._arrived: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)

    def send(self, buffer: Buffer, peer: int, tag: int) -> Request:
        """See Transport.isend. It is done when the system has taken the message."""
        calls().uncertain = True
        self.mailbox.send(peer, b"".join((_TAG.pack(tag), buffer.array.data)))
        return _Send(self, buffer, peer)

    def receive(self, buffer: Buffer, peer: int, tag: int) -> Request:
        """As send()."""
        calls().uncertain = True
        request = _Receive(self, buffer, peer)
        self._receives[peer, tag].append(request)
        return request

    def advance(self) -> None:
        """Give what has arrived to the requests that wait for it. Raises TransportError after close()."""
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
        """Close the mailbox. Messages that nobody has received are lost."""
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
            self._messages.advance()  # two ranks that only send would fill each other's connections
            self._done = self._messages.mailbox.is_sent(self._peer)
            if not self._done:
                self._messages.mailbox.check(self._peer)
        return self._done


class _Receive(Request):
    """message: the tag and the bytes, once they have arrived."""

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
