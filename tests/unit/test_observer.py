"""The observer of a plan: what its events become in the timeline and in a recording."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hvdkit.engine.observe.device_clock import READINGS, DeviceClock
from hvdkit.engine.observe.observer import DRAINED, FILL, FILLED, REDUCED, STARTED, WAIT, PlanObserver
from hvdkit.engine.observe.recording import HEAD, RECORDER, STAMPS, PlanFacts
from hvdkit.engine.observe.stragglers import Window
from hvdkit.engine.observe.timeline import Timeline
from hvdkit.engine.observe.totals import COUNTER
from hvdkit.engine.planned.on_device import Streams
from hvdkit.torch.device.host import HostDevice, HostEvent
from hvdkit.transport.device import Event

FACTS = PlanFacts("optimizer.1", (0, 1), (8, 8), (8, 8), ("w", "b"), threaded=False)
NAMES = [["gradients.w"], ["gradients.b"]]


def play(observer: PlanObserver, number: int) -> None:
    """A round of two buckets, of which the second has to be waited for."""
    for kind in (FILL, FILLED, STARTED):
        observer.event(kind, 0)
    for kind in (FILL, FILLED, STARTED):
        observer.event(kind, 1)
    observer.finishing()
    for kind in (REDUCED, DRAINED):
        observer.event(kind, 0)
    for kind in (WAIT, REDUCED, DRAINED):
        observer.event(kind, 1)
    observer.round_ended(number, 0.0)


@pytest.fixture
def recording() -> Iterator[None]:
    RECORDER.start()
    yield
    RECORDER.stop()
    RECORDER.take()


def test_a_round_without_numbers_is_not_counted_as_a_reduction() -> None:
    before = COUNTER.rounds
    for nbytes in ((8, 8), (0, 0)):  # the second one as UsedMaskExchange has it
        play(PlanObserver(dataclasses.replace(FACTS, nbytes=nbytes), NAMES), 0)
    assert COUNTER.rounds == before + 1


def test_each_event_ends_an_activity_and_begins_the_next(tmp_path: Path) -> None:
    timeline, path = Timeline(), tmp_path / "trace.json"
    observer = PlanObserver(FACTS, NAMES, timeline)
    play(observer, 0)
    timeline.start(str(path))
    play(observer, 1)
    timeline.stop()
    play(observer, 2)
    events = json.loads(path.read_text())
    numbers = {one["args"]["name"]: one["pid"] for one in events if one.get("name") == "process_name"}
    found = {
        name: [one.get("name", "end") for one in events if one.get("pid") == pid and one["ph"] in "BE"]
        for name, pid in numbers.items()
    }
    fill, reduce, drain = "MEMCPY_IN_FUSION_BUFFER", "ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"
    assert found == {
        "gradients.w": [fill, "end", reduce, "end", drain, "end"],
        "gradients.b": [fill, "end", reduce, "end", "WAIT_FOR_OTHER_RANKS", "end", drain, "end"],
    }


@pytest.mark.usefixtures("recording")
def test_a_recorded_round_has_all_times_in_order() -> None:
    observer = PlanObserver(FACTS)
    play(observer, 7)
    (rounds,) = RECORDER.take()
    row = np.frombuffer(rounds.rows[0])
    assert rounds.facts is FACTS and row[HEAD.index("round")] == 7 and len(row) == FACTS.row
    times = row[len(HEAD) :].reshape(2, len(STAMPS))
    assert (np.diff(times, axis=1) >= 0).all() and (times > 0).all()
    first, second = times
    assert first[WAIT] == first[REDUCED], "it was not waited for"
    assert first[STARTED] <= row[HEAD.index("finishing")] <= second[WAIT] <= row[HEAD.index("ended")]


def test_nothing_is_kept_of_rounds_that_nobody_asked_for() -> None:
    play(PlanObserver(FACTS, NAMES, Timeline()), 0)
    assert RECORDER.take() == []


class SlowEvent(Event):
    """See Event: of a device that takes a millisecond for everything that it is given, when the test lets it."""

    def __init__(self, device: SlowDevice) -> None:
        self._device, self._at = device, 0

    def record(self, stream: int) -> None:
        """See Event.record."""
        self._device.given += 1
        self._at = self._device.given

    def done(self) -> bool:
        """See Event.done."""
        return self._at <= self._device.passed

    def synchronize(self) -> None:
        """See Event.synchronize."""
        self._device.waits += 1
        self._device.passed = max(self._device.passed, self._at)

    def elapsed_ms(self, earlier: Event) -> float:
        """See Event.elapsed_ms."""
        assert isinstance(earlier, SlowEvent) and self.done() and earlier.done()
        return float(self._at - earlier._at)


class SlowDevice(HostDevice):
    """given, passed: how much work it has got, and done. waits: how often the host has waited for it."""

    def __init__(self) -> None:
        self.given = self.passed = self.waits = 0

    def make_event(self, *, timing: bool = False) -> Event:  # type: ignore[override]
        """See Device.make_event."""
        assert timing
        return SlowEvent(self)


@pytest.mark.usefixtures("recording")
def test_stages_on_a_device_are_its_times_and_no_step_waits_for_it(tmp_path: Path) -> None:
    timeline, path, device = Timeline(), tmp_path / "trace.json", SlowDevice()
    observer = PlanObserver(FACTS, NAMES, timeline, device=DeviceClock(device, lambda: 0))
    timeline.start(str(path))
    for number in range(4):
        RECORDER.loading(1.0, 1.5 + number)
        play(observer, number)
    assert device.waits == 1 and RECORDER.take() == [], "only to set the clock; nothing is done yet"
    device.passed = device.given
    play(observer, 4)
    (rounds,) = RECORDER.take()
    rows = np.stack([np.frombuffer(row) for row in rounds.rows])
    assert rows[:, HEAD.index("round")].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(rows[:, HEAD.index("loading_s")], [0.5, 1.5, 2.5, 3.5])
    stamps = rows[:, len(HEAD) :].reshape(4, 2, len(STAMPS))
    began, places = stamps[:, 0, FILL], [[0, 1, 2, 7, 7, 8], [3, 4, 5, 9, 10, 11]]
    found_ms = 1000 * (stamps - began[:, None, None])
    np.testing.assert_allclose(found_ms, np.broadcast_to(places, (4, 2, len(STAMPS))), atol=1e-3)
    np.testing.assert_allclose(rows[:, HEAD.index("finishing")] - began, 0.006, atol=1e-6)
    np.testing.assert_allclose(np.diff(rows[:, HEAD.index("ended")]), 0.013, atol=1e-6)
    device.passed = device.given
    timeline.stop()
    assert len(RECORDER.take()[0].rows) == 1, "stopping a timeline or a recording reads what is left"
    times = [one["ts"] for one in json.loads(path.read_text()) if one.get("name") == "MEMCPY_IN_FUSION_BUFFER"]
    np.testing.assert_allclose(np.diff(times), [3000, 10_000] * 4 + [3000], atol=2)
    assert device.waits == 1


def test_a_new_timeline_has_nothing_of_before(tmp_path: Path) -> None:
    timeline, path, device = Timeline(), tmp_path / "trace.json", SlowDevice()
    observer = PlanObserver(FACTS, NAMES, timeline, device=DeviceClock(device, lambda: 0))
    timeline.start(str(tmp_path / "first.json"))
    play(observer, 0)  # sets the clock
    timeline.stop()
    play(observer, 1)  # began while the timeline was on, and is read later
    timeline.start(str(path))
    for number in range(2, 5):
        play(observer, number)
    device.passed = device.given
    timeline.stop()
    times = [one["ts"] for one in json.loads(path.read_text()) if "ts" in one]
    assert len(times) > 2 and min(times) >= 0


def test_seconds_of_a_device_are_its_own_and_cost_three_marks_a_round() -> None:
    device, seconds, windows = SlowDevice(), list[tuple[float, float]](), list[Window]()
    clock = DeviceClock(device, lambda: 0)
    observer = PlanObserver(FACTS, NAMES, None, windows.append, clock, lambda *two: seconds.append(two))
    for number in range(100):
        device.given += number  # each round takes longer than the one before
        play(observer, number)
    assert not seconds and device.waits == 0
    assert device.given == 99 * 100 // 2 + 100 * 3, "marks count as work of the device"
    device.passed = device.given
    play(observer, 100)
    assert seconds == [pytest.approx((0.002, 0.001), abs=1e-6)] * 100
    assert [(one.first, one.last) for one in windows] == [(1, 49), (50, 99)]
    assert [one.waited_s for one in windows] == pytest.approx([0.001] * 2, abs=1e-6)
    assert [one.round_s for one in windows] == pytest.approx([0.003 + 0.025, 0.003 + 0.075], abs=1e-6), "medians"
    device.passed = device.given
    READINGS.read_pending()


def test_seconds_of_rounds_before_a_recording_are_not_read_on_its_clock(tmp_path: Path) -> None:
    timeline, device, seconds = Timeline(), SlowDevice(), list[tuple[float, float]]()
    clock = DeviceClock(device, lambda: 0)
    observer = PlanObserver(FACTS, NAMES, timeline, device=clock, measured=lambda *two: seconds.append(two))
    play(observer, 0)
    timeline.start(str(tmp_path / "trace.json"))
    play(observer, 1)  # at its end the clock is set
    play(observer, 2)
    device.passed = device.given
    timeline.stop()
    play(observer, 3)
    device.passed = device.given
    READINGS.read_pending()
    assert seconds == [pytest.approx((0.012, 0.006), abs=1e-6)] * 2 and device.waits == 1


def test_a_stream_that_fills_a_bucket_waits_for_the_others() -> None:
    device, current = StreamsDevice(), [7]
    streams = Streams(device, lambda: current[0])
    streams.note()
    streams.join()
    assert device.waits_of == [], "one stream is all there is"
    for current[0] in (9, 7, 11):
        streams.note()
    streams.join()
    assert sorted(device.waits_of) == [(11, 7), (11, 9)]
    streams.clear()
    streams.join()
    assert len(device.waits_of) == 2


class StreamsDevice(HostDevice):
    """waits_of: which stream waits for which."""

    def __init__(self) -> None:
        self.waits_of: list[tuple[int, int]] = []

    def make_event(self, *, timing: bool = False) -> HostEvent:
        """See Device.make_event."""
        return StreamEvent()

    def wait(self, stream: int, event: Event) -> None:
        """See Device.wait."""
        assert isinstance(event, StreamEvent)
        self.waits_of.append((stream, event.stream))


class StreamEvent(HostEvent):
    """stream: on which it was recorded."""

    stream = -1

    def record(self, stream: int) -> None:
        """See Event.record."""
        self.stream = stream
