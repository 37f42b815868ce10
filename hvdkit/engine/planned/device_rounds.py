"""Rounds of gradients in a framework's own device memory, reduced by bucket or all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdkit.engine.groups import Group
from hvdkit.engine.observe.device_clock import DeviceClock
from hvdkit.engine.observe.observer import DRAINED, FILL, FILLED, REDUCED, STARTED, PlanObserver
from hvdkit.engine.observe.recording import PlanFacts
from hvdkit.engine.observe.timeline import Timeline
from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.transport.device import Device, Stream


class DeviceRounds:
    """Times and counts the rounds of one list of tensors, for the profile, the timeline and the straggler report.

    Not thread-safe. The host waits for the device only if timeline or profile has been switched on since.

    name: of the list, the same on all ranks.
    group: the ranks that reduce.
    device: the device with the tensors.
    tensors: the list.
    timeline: of this process.
    statistics: added to.
    buckets: for each bucket the indices of its tensors.
    nbytes: for each bucket the bytes that are reduced.
    sent_bytes: for each bucket the bytes that this rank sends.
    """

    def __init__(
        self,
        name: str,
        group: Group,
        device: Device,
        tensors: Sequence[TensorSpec],
        timeline: Timeline,
        statistics: Statistics,
        *,
        buckets: Sequence[Sequence[int]],
        nbytes: Sequence[int],
        sent_bytes: Sequence[int],
    ) -> None:
        self._statistics, self._nbytes, self._sent_bytes = statistics, sum(nbytes), sum(sent_bytes)
        self._number = 0
        self._stream: Stream = 0
        self._buckets = range(len(buckets))
        engine = group.engine
        members = [[tensors[index] for index in bucket] for bucket in buckets]
        firsts = tuple(Plan(tuple(bucket), ()).name() for bucket in members)
        facts = PlanFacts(name, tuple(engine.ranks), tuple(nbytes), tuple(nbytes), firsts, threaded=False)
        names = [[f"gradients.{tensor.name}" for tensor in bucket] for bucket in members]
        clock = DeviceClock(device, lambda: self._stream)
        self._observer = PlanObserver(facts, names, timeline, engine.report_window, clock, statistics.add_seconds)
        statistics.waited_s = None

    def start(self, bucket: int, stream: Stream, enqueue: Callable[[], None]) -> None:
        """Call `enqueue`, which enqueues a bucket's reduction behind the work of `stream`; the first begins a round."""
        self._stream, event = stream, self._observer.event
        event(FILL, bucket)
        event(FILLED, bucket)
        enqueue()
        event(STARTED, bucket)

    def finish(self, join: Callable[[], None]) -> None:
        """End the round. join: makes the stream of the last start() wait for all buckets."""
        number, self._number = self._number, self._number + 1
        self._observer.finishing()
        join()
        for kind in (REDUCED, DRAINED):
            for bucket in self._buckets:
                self._observer.event(kind, bucket)
        self._observer.round_ended(number, 0.0)
        statistics = self._statistics
        statistics.generations += 1
        statistics.reduced_bytes += self._nbytes
        statistics.sent_bytes += self._sent_bytes

    def skip(self, enqueue: Callable[[], None]) -> None:
        """Take part in a round of the other ranks, in which this rank has no gradients; only counts the round."""
        self._number += 1
        enqueue()
