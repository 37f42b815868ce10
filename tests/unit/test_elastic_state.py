"""The state that outlives a change of the world, without a framework."""

from __future__ import annotations

from typing import Any

import pytest

from hvdkit.elastic.state import Handler, ObjectState, State
from hvdkit.errors import HorovodInternalError


class Counter:
    """A thing that must stay the object it is."""

    def __init__(self, count: int) -> None:
        self.count = count


class CounterHandler:
    """Keeps a Counter; rank 0's is always 100."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.save()

    def save(self) -> None:
        self._saved = self._counter.count

    def restore(self) -> None:
        self._counter.count = self._saved

    def sync(self) -> None:
        self._counter.count = 100


class CountingState(ObjectState):
    """An ObjectState that knows Counters."""

    def handler_for(self, value: Any) -> Handler | None:
        return CounterHandler(value) if isinstance(value, Counter) else None


class DividedHandler(CounterHandler):
    """Its gather() fails if it has to, as where a rank dies."""

    fails = False

    def gather(self) -> None:
        if self.fails:
            raise HorovodInternalError("rank 1 has died")


class DividedState(ObjectState):
    """One Counter is divided among ranks, the other is not."""

    def handler_for(self, value: Any) -> Handler | None:
        if not isinstance(value, Counter):
            return None
        return DividedHandler(value) if value.count < 0 else CounterHandler(value)


def test_a_commit_is_of_one_step_though_a_rank_dies_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, divided = Counter(1), Counter(-1)
    state = DividedState(alone, whole=whole, divided=divided, step=1)
    state.commit()
    whole.count, divided.count, state.step = 2, -2, 2
    monkeypatch.setattr(DividedHandler, "fails", True)
    with pytest.raises(HorovodInternalError):
        state.commit()
    state.restore()
    assert (whole.count, divided.count, state.step) == (1, -1, 1)


def alone(value: Any) -> Any:
    return value


def from_rank_0(value: dict[str, Any]) -> dict[str, Any]:
    return {name: f"rank 0's {name}" for name in value}


def test_restore_goes_back_to_the_last_commit() -> None:
    state = ObjectState(alone, epoch=1, best=0.5)
    state.epoch = 2
    state.restore()
    assert state.epoch == 1
    state.epoch, state.best = 3, 0.75
    state.commit()
    state.epoch = 4
    state.restore()
    state.restore()
    assert (state.epoch, state.best) == (3, 0.75)


def test_it_takes_the_arguments_of_horovods() -> None:
    state = ObjectState(bcast_object=from_rank_0, get_rank=lambda: 1, epoch=1)
    state.sync()
    assert state.epoch == "rank 0's epoch" and not hasattr(state, "get_rank")

    class Own(State):
        def __init__(self) -> None:
            super().__init__(bcast_object=lambda value: [value, "rank 0's"], get_rank=lambda: 1)

        def save(self) -> None: ...

        restore = sync = save

    assert Own().tell(7) == [7, "rank 0's"]


def test_what_is_changed_in_place_is_restored_too() -> None:
    losses = [1.0]
    state = ObjectState(alone, losses=losses, nested={"a": [1]})
    state.losses.append(2.0)
    state.nested["a"].append(2)
    state.restore()
    state.losses.append(3.0)
    state.restore()
    assert (state.losses, state.nested) == ([1.0], {"a": [1]})


def test_sync_brings_rank_0s_present_values_and_saves_them() -> None:
    state = ObjectState(from_rank_0, epoch=1, batch=7)
    state.sync()
    assert (state.epoch, state.batch) == ("rank 0's epoch", "rank 0's batch")
    state.epoch = 5
    state.restore()
    assert state.epoch == "rank 0's epoch"
    present = ObjectState(alone, epoch=1)
    present.epoch = 2
    present.sync()
    present.restore()
    assert present.epoch == 2


def test_a_handled_thing_stays_the_same_object() -> None:
    counter = Counter(1)
    state = CountingState(from_rank_0, counter=counter, epoch=0)
    counter.count = 2
    state.restore()
    assert state.counter is counter and counter.count == 1
    state.sync()
    assert state.counter is counter and counter.count == 100
    counter.count = 3
    state.restore()
    assert counter.count == 100


def test_assigning_puts_a_new_thing_in_the_old_ones_place() -> None:
    first, second = Counter(1), Counter(2)
    state = CountingState(alone, counter=first, other=None)
    state.counter = second
    second.count = 5
    state.restore()
    assert (first.count, second.count) == (1, 2)
    state.counter = None
    second.count = 6
    state.commit()
    state.restore()
    assert state.counter is None and second.count == 6
    state.other = second
    second.count = 7
    state.restore()
    assert state.other is second and second.count == 6


def test_other_attributes_are_not_kept() -> None:
    state = ObjectState(alone, epoch=0)
    state.remark = "mine"
    state.restore()
    assert state.remark == "mine"
    with pytest.raises(AttributeError):
        _ = state.nothing


def test_callbacks_follow_the_subclass_reset_in_their_order() -> None:
    seen: list[str] = []

    class Resetting(ObjectState):
        def reset(self) -> None:
            seen.append("reset")

    state = Resetting(alone)
    state.register_reset_callbacks([lambda: seen.append("first"), lambda: seen.append("second")])
    state.register_reset_callbacks([lambda: seen.append("third")])
    state.on_reset()
    assert seen == ["reset", "first", "second", "third"]


def test_commit_saves_and_then_looks_for_changes_of_the_world() -> None:
    seen: list[str] = []

    class Watching(ObjectState):
        def save(self) -> None:
            seen.append("save")

        def check_host_updates(self) -> None:
            seen.append("check")

    Watching(alone).commit()
    assert seen == ["save", "check"]
    with pytest.raises(TypeError, match="abstract"):
        State(alone)  # type: ignore[abstract]
