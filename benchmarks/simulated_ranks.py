"""Many ranks in one process: hvdkit's own agreement code over a wire that is made up, with a clock that is made up.

A rank handles one message after another, each for `message_s` seconds, sent or received; a message arrives `latency_s`
after it was sent, and `byte_s` later for each of its bytes. Nothing else takes time. What is counted of a rank are the
messages and bytes that it has sent and received, and its round: one more than that of the sender of the latest message.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.between.select import Link
from hvdkit.transport.buffer import Array, Buffer, Op, make_buffer
from hvdkit.transport.single import SingleTransport

#: Of a fast network between hosts; the growth does not depend on it.
LINK = Link(latency_s=10e-6, byte_s=1e-10, message_s=2e-6)

_STACK = 256 * 1024


@dataclass(frozen=True)
class Cost:
    """What something has cost `ranks` ranks: of the rank with the most, each, and of all seconds until the last one."""

    ranks: int
    seconds: float
    rounds: int
    messages: int
    nbytes: int


class Wire:
    """Carries messages between so many ranks. deliver: called with a rank that has got one."""

    def __init__(self, size: int, link: Link = LINK) -> None:
        self.size, self._link = size, link
        self.deliver: Callable[[int], None] = lambda rank: None
        self.now = [0.0] * size
        self.inbox: list[list[tuple[int, bytes]]] = [[] for _ in range(size)]
        self._flying: list[tuple[float, int, int, int, bytes, int]] = []
        self._sent = 0
        self.start_counting()

    def start_counting(self) -> None:
        """From now on; all ranks begin together."""
        self._began_s = max(self.now)
        self.now = [self._began_s] * self.size
        self.rounds, self.messages, self.nbytes = ([0] * self.size for _ in range(3))

    def counted(self) -> Cost:
        """Since start_counting()."""
        seconds = max(self.now) - self._began_s
        return Cost(self.size, seconds, max(self.rounds), max(self.messages), max(self.nbytes))

    def send(self, source: int, target: int, message: bytes) -> None:
        """Send; to the rank itself it costs nothing."""
        if source == target:
            self.inbox[source].append((source, message))
            return
        self._handle(source, message)
        arrives = self.now[source] + self._link.latency_s + self._link.byte_s * len(message)
        self._sent += 1  # messages between two ranks keep their order
        heapq.heappush(self._flying, (arrives, self._sent, source, target, message, self.rounds[source] + 1))

    def _handle(self, rank: int, message: bytes) -> None:
        self.now[rank] += self._link.message_s
        self.messages[rank] += 1
        self.nbytes[rank] += len(message)

    def run(self) -> None:
        """Deliver until nothing is under way."""
        while self._flying:
            arrived, _, source, target, message, round_ = heapq.heappop(self._flying)
            self.now[target] = max(self.now[target], arrived)
            self.rounds[target] = max(self.rounds[target], round_)
            self._handle(target, message)
            self.inbox[target].append((source, message))
            self.deliver(target)

    def sleep(self, seconds: float) -> None:
        """Let time pass on all ranks."""
        self.now = [max(self.now) + seconds] * self.size


class SimulatedMailbox:
    """See Mailbox; of one rank."""

    star = False

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank

    def send(self, rank: int, message: bytes) -> None:
        """See Mailbox.send."""
        self._wire.send(self._rank, rank, message)

    def receive(self) -> list[tuple[int, bytes]]:
        """See Mailbox.receive."""
        messages, self._wire.inbox[self._rank] = self._wire.inbox[self._rank], []
        return messages

    def close(self, *, idle: bool = True) -> None:
        """See Mailbox.close."""


class Collectives:
    """What simulated ranks do together: the last one that comes does it for all of them, message by message.

    The algorithms are those that MPI libraries take for so little data: recursive doubling for an allreduce, Bruck's
    for an allgather, a binomial tree for a broadcast.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._given: dict[int, Any] = {}
        self._results: Sequence[Any] = ()
        self._barrier = threading.Barrier(wire.size, self._do)
        self._doing: Callable[[list[Any]], Sequence[Any]] = list

    def together(self, rank: int, given: Any, doing: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """What `doing` makes of all ranks' `given` for this rank; called by all ranks, each in a thread of its own."""
        self._given[rank], self._doing = given, doing
        self._barrier.wait()
        result = self._results[rank]
        self._barrier.wait()  # nobody goes on before all have taken their result
        return result

    def _do(self) -> None:
        if self._given:
            self._results = self._doing([self._given.pop(rank) for rank in range(self._wire.size)])

    def _exchange(self, pairs: Sequence[tuple[int, int, bytes]]) -> None:
        """A round: each (source, target, message) at once."""
        for source, target, message in pairs:
            self._wire.send(source, target, message)
        self._wire.run()
        self._wire.inbox = [[] for _ in range(self._wire.size)]

    def allreduce(self, arrays: list[Array], combine: Callable[[Array, Array], Array]) -> list[Array]:
        """Recursive doubling; ranks beyond a power of two give theirs to another, and get the result from it."""
        size = len(arrays)
        within = 1 << (size.bit_length() - 1)
        arrays = list(arrays)
        extra = range(within, size)
        self._exchange([(rank, rank - within, arrays[rank].tobytes()) for rank in extra])
        for rank in extra:
            arrays[rank - within] = combine(arrays[rank - within], arrays[rank])
        distance = 1
        while distance < within:
            self._exchange([(rank, rank ^ distance, arrays[rank].tobytes()) for rank in range(within)])
            arrays[:within] = [combine(arrays[rank], arrays[rank ^ distance]) for rank in range(within)]
            distance *= 2
        self._exchange([(rank - within, rank, arrays[rank - within].tobytes()) for rank in extra])
        return arrays[:within] + [arrays[rank - within] for rank in extra]

    def allgather(self, pieces: list[bytes]) -> list[bytes]:
        """Bruck's: each rank passes on what it has to one twice as far away each time."""
        size, have = len(pieces), 1
        each = sum(map(len, pieces)) / size
        while have < size:
            passed = bytes(round(each * min(have, size - have)))
            self._exchange([(rank, (rank - have) % size, passed) for rank in range(size)])
            have *= 2
        return [b"".join(pieces)] * size

    def broadcast(self, given: list[bytes], root: int) -> list[bytes]:
        """Down a binomial tree."""
        size, have = len(given), 1
        while have < size:
            pairs = [((root + at) % size, (root + at + have) % size) for at in range(min(have, size - have))]
            self._exchange([(source, target, given[root]) for source, target in pairs])
            have *= 2
        return [given[root]] * size


_COMBINE: dict[Op, Callable[[Array, Array], Array]] = {"min": np.minimum, "max": np.maximum, "sum": np.add}


class SimulatedTransport(SingleTransport):
    """The blocking collectives of one simulated rank, for little data."""

    name = "simulated"

    def __init__(self, collectives: Collectives, rank: int, size: int) -> None:
        super().__init__(NumpyArithmetic())
        self.rank, self.size, self._collectives = rank, size, collectives

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        """See Transport.allreduce."""
        doing = lambda arrays: self._collectives.allreduce(arrays, _COMBINE[op])  # noqa: E731
        buffer.array[:] = self._collectives.together(self.rank, buffer.array.copy(), doing)

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        """See Transport.allgather."""
        gathered = self._collectives.together(self.rank, buffer.array.tobytes(), self._collectives.allgather)
        out = make_buffer(sum(counts), buffer.dtype)
        out.array[:] = np.frombuffer(gathered, out.array.dtype)
        return out

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """See Transport.broadcast."""
        doing = lambda given: self._collectives.broadcast(given, root)  # noqa: E731
        sent = self._collectives.together(self.rank, buffer.array.tobytes(), doing)
        buffer.array[:] = np.frombuffer(sent, buffer.array.dtype)


def run_simulated(size: int, body: Callable[[SimulatedTransport], Any]) -> tuple[list[Any], Cost]:
    """Call `body` on so many ranks, each in a thread; what each returned or raised, and what it cost."""
    wire = Wire(size)
    collectives = Collectives(wire)
    results: list[Any] = [None] * size

    def call(rank: int) -> None:
        try:
            results[rank] = body(SimulatedTransport(collectives, rank, size))
        except Exception as error:  # a result as well, see above
            results[rank] = error

    before = threading.stack_size(_STACK)
    try:
        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
        for one in threads:
            one.start()
    finally:
        threading.stack_size(before)
    for one in threads:
        one.join()
    return results, wire.counted()
