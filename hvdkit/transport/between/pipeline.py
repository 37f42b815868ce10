"""Sums by messages between hosts, in pipelined segments.

While one segment is on the wire, the next segment is cast or scaled for it, and others are added up:

    segment 0   cast    round 1  round 2  cast
    segment 1           cast     round 1  round 2  cast
    segment 2                    cast     round 1  round 2  cast
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from hvdkit.transport.api import TAGS
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.between.collectives import add_up
from hvdkit.transport.between.schedules import Round, largest_part, plan_rounds
from hvdkit.transport.between.wire import Messages, Pending, Wire
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import HALF, Buffer, make_buffer
from hvdkit.transport.request import detach_buffers

_WINDOW = 64  # segments in progress at once

#: Tags of the messages of an Exchange; the remaining ones are for the release of a wire.
EXCHANGE_TAGS = TAGS - 64


class PipelinedExchange:
    """Sums over the ranks of a wire that has messages; all ranks begin the sums in the same order."""

    def __init__(self, wire: Wire, messages: Messages, arithmetic: Arithmetic) -> None:
        self._rank, self._size, self._messages = wire.rank, wire.size, messages
        self._arithmetic = arithmetic
        self._tags = 0

    def __call__(
        self,
        numbers: Buffer,
        spec: BucketSpec,
        algorithm: str,
        message_bytes: int,
        *,
        prescale: float = 1.0,
    ) -> Iterator[bool]:
        """Reduce `numbers` (n,) in place, in steps of SteppedBuckets; yields True from the first step on.

        numbers: this rank's numbers.
        spec: the bucket's description; n may differ from its count.
        algorithm: a name in SCHEDULES that fits the dtype.
        message_bytes: bytes of the largest message.
        prescale: factor on the numbers, before the wire.
        """
        step = largest_part(algorithm, self._size) * max(1, message_bytes // make_buffer(1, spec.wire_dtype).nbytes)
        first, starts = self._tags, deque(range(0, numbers.count, step))
        self._tags += len(starts)
        under_way: deque[_Segment] = deque()
        with ExitStack() as undo:
            undo.callback(detach_buffers, self._messages)
            while starts or under_way:
                while starts and len(under_way) < _WINDOW:
                    start = starts.popleft()
                    stop = min(start + step, numbers.count)
                    tag = (first + start // step) % EXCHANGE_TAGS
                    reduce = functools.partial(self._reduce, numbers.slice(start, stop), spec, algorithm, prescale, tag)
                    under_way.append(_Segment(reduce))
                self._messages.turn()
                while under_way and under_way[0].over:
                    under_way.popleft()
                if under_way:
                    yield True
            undo.pop_all()

    def _reduce(
        self, numbers: Buffer, spec: BucketSpec, algorithm: str, prescale: float, tag: int, pending: Pending
    ) -> Iterator[None]:
        """Reduce one segment; yields when it must wait for messages."""
        arithmetic, dtype = self._arithmetic, spec.wire_dtype
        wire_numbers = numbers
        if dtype != numbers.dtype:
            wire_numbers = make_buffer(numbers.count, dtype)
            arithmetic.cast(wire_numbers, numbers, prescale)
        elif prescale != 1.0:
            arithmetic.combine(numbers, [numbers], scale=prescale)
        # 16-bit floats have a single sum ("pieces"), which is rounded once, together with the factor.
        scale = spec.postscale if dtype in HALF and self._size > 1 else 1.0
        rounds = plan_rounds(algorithm, self._rank, self._size, numbers.count)
        for step in rounds:
            received = self._post(step, wire_numbers, tag, pending)
            yield
            if step.adds is not None:
                received[self._rank] = own = wire_numbers.slice(*step.adds)
                # If every rank adds up everything in one round, the sum is not sent on and need not be rounded.
                out = numbers if len(rounds) == 1 else own
                add_up(out, [received[rank] for rank in sorted(received)], spec, arithmetic, scale)
        if wire_numbers is not numbers and len(rounds) != 1:
            arithmetic.cast(numbers, wire_numbers)
        if spec.postscale != scale:
            arithmetic.combine(numbers, [numbers], scale=spec.postscale)

    def _post(self, step: Round, wire_numbers: Buffer, tag: int, pending: Pending) -> dict[int, Buffer]:
        """Begin a round; return the buffers that will be received, by rank."""
        received = {}
        for peer, start, stop in step.receives:
            target = wire_numbers.slice(start, stop)
            received[peer] = target if step.adds is None else make_buffer(target.count, target.dtype)
            self._messages.receive(received[peer], peer, tag, pending)
        for peer, start, stop in step.sends:
            self._messages.send(wire_numbers.slice(start, stop), peer, tag, pending)
        return received


class _Segment(Pending):
    """A segment of a bucket. reduce: its steps, which count their messages in this object."""

    def __init__(self, reduce: Callable[[Pending], Iterator[None]]) -> None:
        super().__init__()
        self.over = False
        self._steps: Iterator[object] = reduce(self)
        self.wake()

    def wake(self) -> None:
        """See Pending.wake. Continues until it must wait for messages or is done."""
        while not self.count and not self.over:
            self.over = next(self._steps, self) is self
