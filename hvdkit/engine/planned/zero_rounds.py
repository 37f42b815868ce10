"""Rounds of a plan on a rank that has nothing to give: it has joined, and the others go on.

Nobody tells a rank that has joined when the others begin a round. So it begins one by itself, blind: of the first
bucket, with zeros, no tensor present and itself not marked as training. Two things can happen then:

    rank 0, training    rank 1, joined     rank 2, joined
    bucket 0            bucket 0 blind     bucket 0 blind     some rank trains: a round like any other, so that the
    buckets 1, 2, ...   zeros              zeros              joined ranks do the other buckets too, and begin the next
    bucket 0 blind      bucket 0 blind     bucket 0 blind     nobody trains: all have joined (or the plan is given up
                                                              by all), and all see it in the same sum

In the second case the blind rounds are over, on all ranks after the same bucket, and the plan is as if they had never
been. A round begun blind is therefore always completed: by those who train, or because all have begun it. What joined
ranks read from the buckets they throw away, so their gradients and parameters stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable

from hvdkit.transport.buckets import Buckets


class ZeroRounds:
    """The blind rounds of one plan, until nobody trains.

    moving: the plan's buckets, none of them under way. zero: makes a bucket of it say that nothing is here and nobody
    trains here. anyone_trains: does a reduced bucket say so of any rank? started: called when a bucket has been.
    rounds: called at the end of every round that was not blind on all ranks.
    """

    def __init__(
        self,
        moving: Buckets,
        count: int,
        *,
        zero: Callable[[int], None],
        anyone_trains: Callable[[int], bool],
        started: Callable[[], None],
        rounds: Callable[[], None],
    ) -> None:
        self._moving, self._count = moving, count
        self._zero, self._anyone_trains, self._started, self._rounds = zero, anyone_trains, started, rounds
        self._next = self._oldest = 0  # bucket to start, bucket to take
        self.over = False

    def advance(self) -> bool:
        """Do what can be done without waiting; True if anything moved. Raises RankLostError if a rank has ended."""
        if self.over:
            return False
        moved = self._moving.advance()
        if not self._next:
            self._start()
        while self._oldest < self._next and self._moving.finished(self._oldest):
            moved = True
            at = self._oldest
            self.over = at == 0 and not self._anyone_trains(at)
            if self.over:
                return True
            self._oldest += 1
        while self._oldest and self._next < min(self._count, self._oldest + self._moving.depth):
            self._start()
        if self._oldest == self._count:
            self._next = self._oldest = 0
            self._rounds()
        return moved

    def _start(self) -> None:
        at = self._next
        self._zero(at)
        self._next += 1
        self._moving.start(at)
        self._started()
