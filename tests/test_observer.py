"""The observer of a plan: what its events become in the timeline and in a recording."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hvdkit.engine.observe.observer import DRAINED, FILL, FILLED, REDUCED, STARTED, WAIT, PlanObserver
from hvdkit.engine.observe.recording import HEAD, RECORDER, STAMPS, PlanFacts
from hvdkit.engine.observe.timeline import Timeline

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
