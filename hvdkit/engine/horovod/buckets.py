"""Buckets whose reduction is one allreduce of Horovod's each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdkit.engine.horovod.binding import Pending
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buckets import BucketSpec, Elsewhere, plan_memory, see_as
from hvdkit.transport.buffer import Buffer, make_buffer
from hvdkit.transport.polling import Backoff


class HorovodBuckets:
    """See Buckets.

    start: begins the allreduce of a bucket, given its index, its numbers and what is to be done with them. arithmetic:
    casts to a narrow wire type, in which Horovod then adds; so the factors of an average all come before.
    """

    def __init__(
        self,
        specs: Sequence[BucketSpec],
        depth: int | None,
        start: Callable[[int, Any, BucketSpec], Pending],
        arithmetic: Arithmetic,
    ) -> None:
        pieces = [np.zeros(size, np.uint8) for size in plan_memory(specs, depth)]
        self.depth = len(pieces)
        self.memory: Sequence[Buffer] = [see_as(pieces[at % self.depth], spec) for at, spec in enumerate(specs)]
        self.own: Sequence[tuple[int, int]] = [(0, 0)] * len(specs)
        self._specs, self._start, self._arithmetic = specs, start, arithmetic
        self.sent_bytes = sum(memory.nbytes for memory in self.memory)
        self._narrow = {
            at: make_buffer(spec.count, spec.narrow) for at, spec in enumerate(specs) if spec.narrow != "none"
        }
        self._pending: dict[int, Pending] = {}

    def start(self, index: int, elsewhere: Sequence[Elsewhere] = ()) -> None:
        """See Buckets."""
        spec, buffer = self._specs[index], self.memory[index]
        if index in self._narrow:
            self._arithmetic.cast(self._narrow[index], buffer, spec.prescale * spec.postscale)
            spec, buffer = BucketSpec(spec.narrow, spec.count, spec.op), self._narrow[index]
        self._pending[index] = self._start(index, buffer.array, spec)

    def advance(self) -> bool:
        """See Buckets; a thread of Horovod's does all there is."""
        return False

    def finished(self, index: int) -> bool:
        """See Buckets."""
        pending = self._pending.get(index)
        if pending is not None and pending.done():
            self._finish(index)
        return index not in self._pending

    def _finish(self, index: int) -> None:
        self._pending[index].wait()
        del self._pending[index]
        if index in self._narrow:
            self._arithmetic.cast(self.memory[index], self._narrow[index])

    @property
    def busy(self) -> bool:
        """See Buckets."""
        return bool(self._pending)

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """See Buckets; Horovod's own report tells who is missing."""
        waiting = Backoff(watch)
        while not self.finished(index):
            waiting.pause()

    def close(self) -> None:
        """See Buckets."""
        self.memory = []
