"""The observer of a plan: an event for each stage of a bucket, for timeline, profile and straggler report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdkit.engine.observe.recording import RECORDER, STAMPS, PlanFacts, clock
from hvdkit.engine.observe.stragglers import Window, median
from hvdkit.engine.observe.timeline import Timeline

#: Kinds of events, in their order for one bucket. WAIT comes only if the bucket is not reduced when it is needed.
FILL, FILLED, STARTED, WAIT, REDUCED, DRAINED = range(len(STAMPS))
#: Event -> the activity that it begins in the timeline; it ends the activity before.
_ACTIVITIES = {
    FILL: "MEMCPY_IN_FUSION_BUFFER",
    FILLED: "ALLREDUCE",
    WAIT: "WAIT_FOR_OTHER_RANKS",
    REDUCED: "MEMCPY_OUT_FUSION_BUFFER",
    DRAINED: "",
}
_ROUNDS = 50  # of a window
_RANKS = 64  # windows of larger groups are longer, so that rank 0 receives no more of them in a second


class PlanObserver:
    """Observes one plan on one rank; an event costs two comparisons while neither timeline nor profile is on.

    names: of each bucket's slots, for the timeline. report: sends a window of rounds to rank 0.
    The caller holds the reducer's lock.
    """

    def __init__(
        self,
        facts: PlanFacts,
        names: Sequence[Sequence[str]] = (),
        timeline: Timeline | None = None,
        report: Callable[[Window], None] | None = None,
    ) -> None:
        self._facts, self._names, self._timeline = facts, names, timeline or Timeline()
        self._report = report if len(facts.ranks) > 1 else None
        self._length = _ROUNDS * -(-len(facts.ranks) // _RANKS)
        self._waits_s: list[float] = []
        self._rounds_s: list[float] = []
        self._finishing_s = self._ended_s = 0.0
        self._stamps: list[float] | None = None
        self._begin_round()

    def _begin_round(self) -> None:
        self._stamps = [0.0] * (len(STAMPS) * len(self._facts.nbytes)) if RECORDER.on else None

    def event(self, kind: int, bucket: int) -> None:
        """Record that the bucket has reached a stage: FILL, FILLED, ..."""
        if self._stamps is not None:
            at = len(STAMPS) * bucket
            self._stamps[at + kind] = now = clock()
            if kind == REDUCED and not self._stamps[at + WAIT]:
                self._stamps[at + WAIT] = now
        if self._timeline.on and kind in _ACTIVITIES:
            for name in self._names[bucket]:
                self._timeline.end(name)
                if _ACTIVITIES[kind]:
                    self._timeline.begin(name, _ACTIVITIES[kind])

    def finishing(self) -> None:
        """Record that all gradients have arrived and training waits for results."""
        self._finishing_s = clock()

    def round_ended(self, number: int, waited_s: float) -> None:
        """Record the end of a round. number: the same on all ranks. waited_s: seconds that this rank waited in it."""
        now = clock()
        if self._stamps is not None:
            RECORDER.add(self._facts, number, self._finishing_s, now, self._stamps)
        self._begin_round()
        if self._report is None:
            return
        if self._ended_s:
            self._waits_s.append(waited_s)
            self._rounds_s.append(now - self._ended_s)
        self._ended_s = now
        if (number + 1) % self._length == 0 and self._waits_s:
            first = number + 1 - len(self._waits_s)
            self._report(Window(self._facts.name, first, number, median(self._waits_s), median(self._rounds_s)))
            self._waits_s, self._rounds_s = [], []
