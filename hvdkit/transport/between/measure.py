"""Measures the link between hosts, and the library's own allreduce over it, in about 0.1 s at 1 Gbit/s.

All ranks send to the next rank at the same time, so each gets the speed that it has while all ranks use the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hvdkit.transport.between.select import MESSAGE_BYTES, Link, Measured
from hvdkit.transport.between.wire import Pending, Wire
from hvdkit.transport.buffer import Buffer, make_buffer
from hvdkit.transport.polling import Backoff
from hvdkit.transport.request import Request, detach_buffers

_SMALL_TURNS = 8
_FLOOD = 16  # small messages in flight at once
_STREAM_S = 0.015  # a stream of this length shows the speed beyond the burst that a link lets pass at once
_STEP = MESSAGE_BYTES[0]
_ASKED = 2**16  # bytes for which MPI does a rendezvous with the receiver, unlike _STEP: it takes two more latencies
_LARGEST_STREAM = 2**24 // _STEP  # steps

Check = Callable[[], None]


def measure(wire: Wire, check: Check) -> Measured:
    """Measure the link and the library's allreduce between all ranks of a wire, at least two; collective.

    All ranks get the same numbers: those of the slowest rank. check: called in waits; may raise.
    """
    ring = _Ring(wire, check)
    ring.shift(1, 1)  # makes connections
    latency = ring.agree(min(ring.shift(1, 1) for _ in range(_SMALL_TURNS)))
    flood = min(ring.shift(1, _FLOOD) for _ in range(3))
    message = max(0.0, ring.agree(flood) - latency) / (_FLOOD - 1)
    # The earlier streams use up the burst that even a slow link lets pass at once; and by the last stream TCP has
    # raised its sending rate to the maximum.
    count, wanted = 1, _STREAM_S + 4 * latency
    while (seconds := ring.stream(count, latency)) < wanted and count < _LARGEST_STREAM:
        count = min(_LARGEST_STREAM, 8 * count, max(2 * count, int(count * 1.5 * wanted / seconds)))
    seconds = min(seconds, ring.stream(count, latency))  # other work on a host can only increase the time
    link = Link(latency, seconds / (count * _STEP), message)
    sizes = sorted({8, _STEP, _ASKED, count * _STEP}, reverse=True)
    library_samples = [(size, ring.reduce(size)) for size in sizes]
    return Measured(wire.size, link, tuple(reversed(library_samples)))


class _Ring:
    """The ranks of a wire as a ring, in which each rank has a next rank."""

    def __init__(self, wire: Wire, check: Check) -> None:
        self._wire, self._check = wire, check
        self._next, self._before = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size

    def shift(self, nbytes: int, count: int) -> float:
        """Return the seconds for `count` messages to the next rank, and as many from the previous rank."""
        self.agree(0.0)
        sent, received = make_buffer(nbytes * count, "uint8"), make_buffer(nbytes * count, "uint8")
        began = time.perf_counter()
        if self._wire.messages is None:
            counts = [
                [nbytes * count * (rank == peer) for rank in range(self._wire.size)]
                for peer in (self._next, self._before)
            ]
            self._wait_for(self._wire.alltoall(sent, counts[0], received, counts[1]))
            return time.perf_counter() - began
        pending = Pending()
        for at in range(0, nbytes * count, nbytes):
            self._wire.messages.receive(received.slice(at, at + nbytes), self._before, 0, pending)
            self._wire.messages.send(sent.slice(at, at + nbytes), self._next, 0, pending)
        waiting = Backoff(self._check)
        try:
            self._wire.messages.turn()
            while pending.count:
                waiting.pause()
                self._wire.messages.turn()
        except BaseException:
            detach_buffers(self._wire.messages)
            raise
        return time.perf_counter() - began

    def stream(self, count: int, latency: float) -> float:
        """Return the seconds that the bytes of `count` large messages take, without the latency."""
        return max(self.agree(self.shift(_STEP, count)) - latency, 1e-7)

    def reduce(self, nbytes: int) -> float:
        """Return the seconds of the library's allreduce: the shorter of two runs; the longer if both are long.

        With many bytes, Open MPI sometimes runs the two directions one after the other, which takes twice as long.
        """
        numbers, found = Buffer(np.zeros(nbytes // 4, np.float32), "float32"), []
        for _ in range(2):
            began = time.perf_counter()
            self._wait_for(self._wire.allreduce(numbers, numbers, "sum"))
            found.append(self.agree(time.perf_counter() - began))
        return max(found) if min(found) > _STREAM_S else min(found)

    def agree(self, seconds: float) -> float:
        """Return the largest of all ranks' numbers; also synchronizes the ranks."""
        number = Buffer(np.array([seconds]), "float64")
        self._wait_for(self._wire.allreduce(number, number, "max"))
        return float(number.array[0])

    def _wait_for(self, request: Request) -> None:
        request.check = self._check
        request.wait()
