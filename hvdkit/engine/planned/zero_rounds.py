"""Rounds of a plan on a rank that has joined: it contributes zeros, and the others train on.

Nobody tells a joined rank that the others begin a round. So it starts the first bucket of the next round in advance,
with zeros: no tensor used, and itself not marked as training. Then one of two things happens:

    rank 0, training    rank 1, joined    rank 2, joined
    bucket 0            bucket 0 zeros    bucket 0 zeros    some rank trains: a round like any other, so the joined
    buckets 1, 2, ...   zeros             zeros             ranks do the other buckets too, and begin the next round
    bucket 0 zeros      bucket 0 zeros    bucket 0 zeros    no rank trains: all have joined, or all close the plan; all
                                                            of them read that in the same sum

In the second case zero rounds are over, on all ranks after the same bucket, and the plan is as if they had not been.
So every zero round that is begun is completed: by those who train, or because all ranks have begun it. A joined rank
drops the results, so its gradients and parameters stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable

from hvdkit.engine.planned.used_masks import Masks
from hvdkit.transport.buckets import Buckets


class ZeroRounds:
    """The zero rounds of one plan, until no rank trains.

    buckets: of the plan, none of them started. masks: of the buckets. on_start: called after a bucket has been started.
    on_end: called at the end of every round in which some rank trained.
    """

    def __init__(
        self, buckets: Buckets, masks: Masks, *, on_start: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        self._buckets, self._masks, self._on_start, self._on_end = buckets, masks, on_start, on_end
        self._count = len(buckets.memory)
        self._next = self._oldest = 0  # bucket to start, bucket to read
        self.over = False

    def advance(self) -> bool:
        """Do what can be done without waiting; True if anything moved. Raises RankLostError if a rank has ended."""
        if self.over:
            return False
        moved = self._buckets.advance()
        if not self._next:
            self._start()
        while self._oldest < self._next and self._buckets.finished(self._oldest):
            moved = True
            self.over = self._oldest == 0 and not self._masks.anyone_trains(0)
            if self.over:
                return True
            self._oldest += 1
        while self._oldest and self._next < min(self._count, self._oldest + self._buckets.depth):
            self._start()
        if self._oldest == self._count:
            self._next = self._oldest = 0
            self._on_end()
        return moved

    def _start(self) -> None:
        self._buckets.memory[self._next].array[:] = 0
        self._buckets.start(self._next)
        self._next += 1
        self._on_start()
