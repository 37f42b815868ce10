"""Buckets whose reduction is one allreduce of Horovod's each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdkit.engine.horovod.binding import Pending
from hvdkit.errors import TransportError
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buckets import ALLREDUCE, BucketSpec, InPlaceSegment, Phases, SteppedBuckets, plan_memory, see_as
from hvdkit.transport.buffer import Buffer, make_buffer


class HorovodBuckets(SteppedBuckets):
    """See Buckets; start() only. Horovod's own report says who is missing, so nothing looks after the peers here.

    begin: begins the allreduce of a bucket, given its index, its numbers and what is to be done with them. arithmetic:
    casts to a 16-bit wire dtype, in which Horovod then adds; so the factors of an average all come before.
    """

    def __init__(
        self,
        specs: Sequence[BucketSpec],
        depth: int | None,
        begin: Callable[[int, Any, BucketSpec], Pending],
        arithmetic: Arithmetic,
    ) -> None:
        super().__init__(check=lambda: None)
        pieces = [np.zeros(size, np.uint8) for size in plan_memory(specs, depth)]
        self.depth = len(pieces)
        self.memory: Sequence[Buffer] = [see_as(pieces[at % self.depth], spec) for at, spec in enumerate(specs)]
        self.owned: Sequence[tuple[int, int]] = [(0, 0)] * len(specs)
        self.shard = self.owned
        self.sent_bytes = sum(memory.nbytes for memory in self.memory)
        self._specs, self._begin, self._arithmetic = specs, begin, arithmetic
        self._narrow = {
            at: make_buffer(spec.count, spec.narrow) for at, spec in enumerate(specs) if spec.narrow != "none"
        }

    def steps(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> Iterator[bool]:
        """See SteppedBuckets. Raises TransportError for a single phase."""
        if phases != ALLREDUCE:
            raise TransportError(
                "Horovod's core reduces whole buckets: reduce_scatter() and all_gather() of a bucket are hvdkit's own. "
                "Leave HVDKIT_ENGINE=horovod out, or reduce whole buckets with start()."
            )
        return self._allreduce(index)

    def _allreduce(self, index: int) -> Iterator[bool]:
        spec, buffer, narrow = self._specs[index], self.memory[index], self._narrow.get(index)
        if narrow is not None:
            self._arithmetic.cast(narrow, buffer, spec.prescale * spec.postscale)
            spec = BucketSpec(spec.narrow, spec.count, spec.op)
        pending = self._begin(index, (buffer if narrow is None else narrow).array, spec)
        while not pending.done():
            yield True
        pending.wait()
        if narrow is not None:
            self._arithmetic.cast(buffer, narrow)
