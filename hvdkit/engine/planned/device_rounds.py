"""Rounds of gradients that a framework hands over all at once, in a device's memory: observed as one bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdkit.engine.groups import Group
from hvdkit.engine.observe.device_clock import DeviceClock
from hvdkit.engine.observe.observer import DRAINED, FILL, FILLED, REDUCED, STARTED, PlanObserver
from hvdkit.engine.observe.recording import PlanFacts
from hvdkit.engine.observe.timeline import Timeline
from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.transport.device import Device


class DeviceRounds:
    """Times and counts the rounds of one list of tensors, for the profile, the timeline and the straggler report.

    name: of the list, the same on all ranks. nbytes: of a round, as they are reduced. sent_bytes: of them by this rank.
    statistics: added to.
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
        nbytes: int,
        sent_bytes: int,
    ) -> None:
        self._statistics, self._nbytes, self._sent_bytes = statistics, nbytes, sent_bytes
        self._number = self._stream = 0
        engine, plan = group.engine, Plan(tuple(tensors), ())
        facts = PlanFacts(name, tuple(engine.ranks), (nbytes,), (nbytes,), (plan.name(),), threaded=False)
        names = [[f"gradients.{tensor.name}" for tensor in tensors]]
        stalls, clock = engine.stall_report, DeviceClock(device, lambda: self._stream)
        report = None if stalls is None else stalls.report_window
        self._observer = PlanObserver(facts, names, timeline, report, clock, statistics.add_seconds)
        statistics.waited_s = None

    def run(self, stream: int, start: Callable[[], None], join: Callable[[], None], *, joined: bool = False) -> None:
        """Do a round: start() enqueues the reduction after what `stream` has been given, join() lets that wait for it.

        joined: is it one of the other ranks, in which this rank has no gradients? It is counted only.
        One thread at a time. The host waits for the device only where timeline or profile has been switched on since.
        """
        number, self._number = self._number, self._number + 1
        if joined:
            start()
            join()
            return
        self._stream, event = stream, self._observer.event
        event(FILL, 0)
        event(FILLED, 0)
        start()
        event(STARTED, 0)
        self._observer.finishing()
        join()
        event(REDUCED, 0)
        event(DRAINED, 0)
        self._observer.round_ended(number, 0.0)
        statistics = self._statistics
        statistics.generations += 1
        statistics.reduced_bytes += self._nbytes
        statistics.sent_bytes += self._sent_bytes
