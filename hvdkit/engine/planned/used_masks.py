"""Used masks: the tensors of a bucket that a rank uses in a round; they lie behind the tensors and are reduced too.

Each bucket ends with one element a slot, 1 if this rank uses the slot's tensor and 0 if not, and one more element, 1 if
this rank trains and 0 if it has joined. So after the sum an element is 0 exactly if no rank has a 1.

A joined rank contributes zeros while the others train on. It gets no message when they begin a round. So it starts the
first bucket of the next round in advance, with zeros: no tensor is used, and the rank is not marked as training. Then
one of two things happens:

    rank 0, training    rank 1, joined    rank 2, joined
    bucket 0            bucket 0 zeros    bucket 0 zeros    some rank trains: a round like any other, so the joined
    buckets 1, 2, ...   zeros             zeros             ranks do the other buckets too, and begin the next round
    bucket 0 zeros      bucket 0 zeros    bucket 0 zeros    no rank trains: all have joined, or all close the plan; all
                                                            of them read that in the same sum

In the second case the zero rounds end on all ranks after the same bucket, and the plan is as if they had not happened.
So every zero round that has begun is completed: by the ranks that train, or because all ranks have begun it. A joined
rank discards the results, so its gradients and parameters do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from hvdkit.engine.planned.plan import Bucket
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buckets import Buckets
from hvdkit.transport.buffer import HALF, Buffer, make_buffer


class Masks(Protocol):
    """The masks of a plan, in the memory of its buckets."""

    def mark(self, bucket: int, locally_unused: frozenset[int], /) -> None:
        """Mark this rank as training, and all tensors of the bucket except these as used."""

    def globally_unused(self, bucket: int, /) -> Collection[int]:
        """Return a reduced bucket's tensors that no rank uses. Reads the mask only if this rank misses a tensor."""

    def anyone_trains(self, bucket: int, /) -> bool:
        """Return whether at least one rank that has not joined contributed to a reduced bucket."""


class UsedMasks:
    """Masks in host memory. memory: the memory of each bucket, (bucket.count,)."""

    def __init__(self, buckets: Sequence[Bucket], memory: Sequence[Buffer], arithmetic: Arithmetic) -> None:
        self._buckets, self._arithmetic = buckets, arithmetic
        self._masks = [
            whole.slice(bucket.data_count, bucket.count) for bucket, whole in zip(buckets, memory, strict=True)
        ]
        self._ones = [_one(bucket.dtype, arithmetic) for bucket in buckets]
        self._locally_unused: dict[int, frozenset[int]] = {}  # of the buckets between mark() and globally_unused()

    def mark(self, bucket: int, locally_unused: frozenset[int]) -> None:
        mask = self._masks[bucket].array
        mask.fill(self._ones[bucket])
        self._locally_unused[bucket] = locally_unused
        if locally_unused:
            slots = self._buckets[bucket].slots
            mask[[position for position, slot in enumerate(slots) if slot.tensor in locally_unused]] = 0

    def globally_unused(self, bucket: int) -> Collection[int]:
        if not self._locally_unused.pop(bucket):
            return ()
        marks = zip(self._buckets[bucket].slots, self._read(bucket), strict=False)
        return frozenset(slot.tensor for slot, mark in marks if not mark)

    def anyone_trains(self, bucket: int) -> bool:
        return self._read(bucket)[-1] > 0

    def _read(self, bucket: int) -> list[float]:
        numbers = Buffer(np.empty(self._masks[bucket].count, np.float32), "float32")
        self._arithmetic.cast(numbers, self._masks[bucket])
        marks: list[float] = numbers.array.tolist()
        return marks


def _one(dtype: str, arithmetic: Arithmetic) -> np.generic:
    """Return the number 1 in the dtype's storage."""
    buffer = make_buffer(1, dtype)
    if dtype in HALF:
        arithmetic.cast(buffer, Buffer(np.ones(1, np.float32), "float32"))
    else:
        buffer.array[:] = 1
    one: np.generic = buffer.array[0]
    return one


class JoinRounds:
    """The zero rounds of one plan, until no rank trains.

    buckets: of the plan, none of them started.
    masks: of the buckets.
    start: starts a bucket.
    on_end: called at the end of every round in which some rank trained.
    """

    def __init__(
        self, buckets: Buckets, masks: Masks, start: Callable[[int], None], on_end: Callable[[], None]
    ) -> None:
        self._buckets, self._masks, self._start, self._on_end = buckets, masks, start, on_end
        self._count = len(buckets.memory)
        self._next = self._oldest = 0  # bucket to start, bucket to read
        self.over = False

    def advance(self) -> bool:
        """Advance without waiting. Returns True if there was progress. Raises RankLostError if a rank has ended."""
        if self.over:
            return False
        moved = self._buckets.advance()
        if not self._next:
            self._start_next()
        while self._oldest < self._next and self._buckets.finished(self._oldest):
            moved = True
            self.over = self._oldest == 0 and not self._masks.anyone_trains(0)
            if self.over:
                return True
            self._oldest += 1
        while self._oldest and self._next < min(self._count, self._oldest + self._buckets.depth):
            self._start_next()
        if self._oldest == self._count:
            self._next = self._oldest = 0
            self._on_end()
        return moved

    def _start_next(self) -> None:
        self._buckets.memory[self._next].array[:] = 0
        self._start(self._next)
        self._next += 1
