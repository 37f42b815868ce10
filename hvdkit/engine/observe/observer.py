"""The observer of a plan: an event for each stage of a bucket, for timeline, profile and straggler report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdkit.engine.observe.device_clock import READINGS, DeviceClock
from hvdkit.engine.observe.recording import RECORDER, STAMPS, PlanFacts, clock
from hvdkit.engine.observe.stragglers import Window, median
from hvdkit.engine.observe.timeline import Timeline
from hvdkit.engine.observe.totals import COUNTER
from hvdkit.transport.device import Event

#: Kinds of events, in their order for one bucket. WAIT occurs only if the bucket is not reduced when it is needed.
FILL, FILLED, STARTED, WAIT, REDUCED, DRAINED = range(len(STAMPS))
#: Event -> the activity that it begins in the timeline; it ends the activity before.
_ACTIVITIES = {
    FILL: "MEMCPY_IN_FUSION_BUFFER",
    FILLED: "ALLREDUCE",
    WAIT: "WAIT_FOR_OTHER_RANKS",
    REDUCED: "MEMCPY_OUT_FUSION_BUFFER",
    DRAINED: "",
}
_FINISHING, _ENDED = len(STAMPS), len(STAMPS) + 1  # kinds of events of a round
_ROUNDS = 50  # number of rounds in a window
_RANKS = 64  # windows of larger groups are longer, so that rank 0 does not receive more of them in a second


class PlanObserver:
    """Observes one plan on one rank; an event costs two comparisons while neither timeline nor profile is on.

    With a device all times are of the device's work, and are read in later rounds, when the work is done. While neither
    timeline nor profile is on, three points of such a round are marked: the beginning of its first bucket, the
    beginning of training's wait, and the end of the round. The caller holds the reducer's lock.

    facts: of the plan.
    names: of each bucket's slots, for the timeline.
    timeline: of this process.
    report: sends a window of rounds to rank 0.
    device: the clock of a device with the buckets; None for the host.
    measured: called after each round of a device with the seconds from the first to the last point, and from the second
        to the last; the latter is the rank's wait in the round's window.
    """

    def __init__(
        self,
        facts: PlanFacts,
        names: Sequence[Sequence[str]] = (),
        timeline: Timeline | None = None,
        report: Callable[[Window], None] | None = None,
        device: DeviceClock | None = None,
        measured: Callable[[float, float], None] | None = None,
    ) -> None:
        self._facts, self._names, self._timeline = facts, names, timeline or Timeline()
        self._nbytes = sum(facts.nbytes)
        self._report = report if len(facts.ranks) > 1 else None
        self._length = _ROUNDS * -(-len(facts.ranks) // _RANKS)
        self._waits_s: list[float] = []
        self._rounds_s: list[float] = []
        self._ended_s = 0.0
        self._device, self._measured = device, measured
        self._stages: list[tuple[int, int, float]] = []  # kind, bucket and time of each event
        self._marks: list[tuple[int, int, Event]] = []  # the same for a device, with its event instead of the time
        self._every_stage = False  # is the round recorded, or on a device and drawn in the timeline?
        self._end_of_device = 0, 0.0  # the clock's times_set and the end of the last round that was read
        self._begin_round()

    def _begin_round(self) -> None:
        before, self._every_stage = self._every_stage, RECORDER.on
        self._stages, self._marks = [], []
        if self._device is not None:
            self._every_stage = self._every_stage or self._timeline.on
            if self._every_stage and not before:
                self._device.set()

    def event(self, kind: int, bucket: int) -> None:
        """Record that the bucket has reached a stage: FILL, FILLED, ..."""
        if self._device is not None:
            if self._every_stage or (kind == FILL and not self._marks):
                self._marks.append((kind, bucket, self._device.mark()))
            return
        if self._every_stage:
            self._stages.append((kind, bucket, clock()))
        if self._timeline.on:
            self._draw(kind, bucket, None)

    def _draw(self, kind: int, bucket: int, at_s: float | None) -> None:
        for name in self._names[bucket] if kind in _ACTIVITIES else ():
            self._timeline.end(name, at_s)
            if _ACTIVITIES[kind]:
                self._timeline.begin(name, _ACTIVITIES[kind], at_s)

    def finishing(self) -> None:
        """Record that all gradients have arrived and training waits for results."""
        if self._device is not None:
            self._marks.append((_FINISHING, 0, self._device.mark()))
        elif self._every_stage:
            self._stages.append((_FINISHING, 0, clock()))

    def round_ended(self, number: int, waited_s: float) -> None:
        """Record the end of a round.

        number: the same on all ranks. waited_s: seconds that this rank waited in the round; not used with a device.
        """
        now = clock()
        if self._nbytes:  # a plan without bytes is that of UsedMaskExchange, which only exchanges used masks
            COUNTER.rounds += 1
        if self._device is None:
            COUNTER.waited_s += waited_s
        else:
            COUNTER.device_rounds += 1
        COUNTER.nbytes += self._nbytes
        if self._device is not None:
            self._read_later(self._device, number, self._marks)
        elif self._every_stage:
            self._record(number, [*self._stages, (_ENDED, 0, now)], RECORDER.end_loading())
        self._begin_round()
        if self._device is None:
            self._count(number, waited_s, now - self._ended_s if self._ended_s else None)
            self._ended_s = now

    def _count(self, number: int, waited_s: float, round_s: float | None) -> None:
        """Add a round to the window, and report the window at its end. round_s: None if the last round is unknown."""
        if self._report is None:
            return
        if round_s is not None:
            self._waits_s.append(waited_s)
            self._rounds_s.append(round_s)
        if (number + 1) % self._length == 0 and self._waits_s:
            first = number + 1 - len(self._waits_s)
            self._report(Window(self._facts.name, first, number, median(self._waits_s), median(self._rounds_s)))
            self._waits_s, self._rounds_s = [], []

    def _read_later(self, device: DeviceClock, number: int, marks: list[tuple[int, int, Event]]) -> None:
        marks.append((_ENDED, 0, device.mark()))
        every_stage, times_set = self._every_stage, device.times_set
        loading = RECORDER.end_loading() if every_stage and RECORDER.on else None

        def read() -> None:
            times = device.read([event for _, _, event in marks], times_set)
            if times is None:  # the clock was set since, because a timeline or recording has begun
                return
            stages = [(kind, bucket, at) for (kind, bucket, _), at in zip(marks, times, strict=True)]
            self._measure(number, stages, times_set)
            if loading is not None:
                self._record(number, stages, loading)
            for kind, bucket, at in stages if every_stage else ():
                self._draw(kind, bucket, at)

        READINGS.flush()
        READINGS.add(marks[-1][2], read)

    def _measure(self, number: int, stages: Sequence[tuple[int, int, float]], times_set: int) -> None:
        finishing_s = next(at for kind, _, at in stages if kind == _FINISHING)
        began_s, ended_s = stages[0][2], stages[-1][2]
        if self._measured is not None:
            self._measured(ended_s - began_s, ended_s - finishing_s)
        set_before, before_s = self._end_of_device
        self._end_of_device = times_set, ended_s
        self._count(number, ended_s - finishing_s, ended_s - before_s if before_s and set_before == times_set else None)

    def _record(self, number: int, stages: Sequence[tuple[int, int, float]], loading: tuple[float, float, int]) -> None:
        stamps, ends = [0.0] * (len(STAMPS) * len(self._facts.nbytes)), {}
        for kind, bucket, at in stages:
            if kind >= len(STAMPS):
                ends[kind] = at
            else:
                stamps[len(STAMPS) * bucket + kind] = at
        for first in range(0, len(stamps), len(STAMPS)):
            stamps[first + WAIT] = stamps[first + WAIT] or stamps[first + REDUCED]
        RECORDER.add(self._facts, number, ends[_FINISHING], ends[_ENDED], stamps, loading)
