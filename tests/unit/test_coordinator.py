"""Operations with numbers give the same answers as operations without, in whatever order ranks come, join and leave."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.config import read_config
from hvdkit.engine.named.coordinator import Coordinator, Item, Numbers, _difference
from hvdkit.engine.named.operation import JOINING, AllJoined, Answer, Failed, OperationRequest, Ready
from hvdkit.engine.observe.stall import Stalls

_ASKED = OperationRequest("allreduce", (("float32", (3,)),), (("op", "sum"),))
_OTHER = OperationRequest("allreduce", (("float32", (4,)),), (("op", "sum"),))


def _who(rank: int) -> str:
    return f"rank {rank}"


class _Ranks:
    """Ranks that announce to a coordinator, by number where they have heard one; or never by number."""

    def __init__(self, size: int, *, numbered: bool) -> None:
        self.size, self.numbered = size, numbered
        self.coordinator = Coordinator(size, _who)
        self.numbers = Numbers()
        self.by_number = 0

    def announce(self, rank: int, names: list[str], asked: OperationRequest = _ASKED) -> None:
        items = [self.numbers.item(name, asked) if self.numbered else (name, asked) for name in names]
        self.by_number += sum(isinstance(item, int) for item in items)
        self.coordinator.announce(1 << rank, items, 0.0)

    def join(self, rank: int) -> None:
        self.coordinator.announce(1 << rank, [("", JOINING)], 0.0)

    def take_answers(self) -> list[Answer]:
        answers, self.coordinator.answers = self.coordinator.answers, []
        return answers

    def on_message(self) -> list[str]:
        heard = []
        for answer in self.take_answers():
            ready = self.numbers.ready[answer] if isinstance(answer, int) else answer
            if isinstance(ready, Ready):
                if ready.number >= 0:
                    assert ready.number == self.numbers.add(ready.name, ready.request)
                heard.append(f"ready {ready.name} {ready.joined}")
            else:
                heard.append(f"{ready}")
        return sorted(heard)


def _play(ranks: _Ranks, seed: int) -> list[list[str]]:
    dice, heard = random.Random(seed), []
    names = [f"t{at}" for at in range(12)]
    for turn in range(8):
        event = dice.random()
        gone = dice.randrange(ranks.size) if event < 0.25 else -1
        odd = dice.choice(names) if event > 0.7 else ""
        for rank in dice.sample(range(ranks.size), ranks.size):
            mine = dice.sample(names, len(names))
            if rank == gone:
                mine = mine[: len(mine) // 2]
            cut = dice.randrange(len(mine) + 1)
            for part in (mine[:cut], mine[cut:]):
                ranks.announce(rank, [name for name in part if name != odd])
                if odd in part:
                    ranks.announce(rank, [odd], _OTHER if rank == dice.randrange(ranks.size) else _ASKED)
            if rank == gone:
                ranks.join(rank)
        if gone >= 0:
            for rank in range(ranks.size):
                if rank != gone:
                    ranks.join(rank)
        heard.append(ranks.on_message())
        heard.append(sorted(f"{one.name} {one.present}" for one in ranks.coordinator.waiting(turn)))
    ranks.coordinator.leave(0, "rank 0 has gone")
    heard.append(ranks.on_message())
    return heard


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@given(seed=st.integers(0, 10**6))
def test_numbers_change_no_answer(size: int, seed: int) -> None:
    assert _play(_Ranks(size, numbered=True), seed) == _play(_Ranks(size, numbered=False), seed)


def test_what_comes_a_third_time_comes_by_number() -> None:
    ranks = _Ranks(2, numbered=True)
    for _ in range(3):
        assert not ranks.by_number
        for rank in range(2):
            ranks.announce(rank, ["a", "b"])
        assert len(ranks.on_message()) == 2
    assert ranks.by_number == 4


def test_what_ranks_have_of_their_own_has_no_number() -> None:
    ranks = _Ranks(2, numbered=True)
    for kind in ("allgather", "alltoall", "gradients"):
        for _ in range(3):
            for rank in range(2):
                ranks.announce(rank, ["a"], OperationRequest(kind, ()))
            assert len(ranks.on_message()) == 1
    assert not ranks.by_number


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((("y", "1"),), ("x", "1", "nothing")),
        ((), ("x", "1", "nothing")),
        ((("x", "1"), ("y", "2")), ("y", "nothing", "2")),
        ((("x", "2"),), ("x", "1", "2")),
    ],
)
def test_options_that_differ_in_any_way_are_seen(other: tuple[tuple[str, str], ...], words: tuple[str, ...]) -> None:
    one = OperationRequest("step", (), (("x", "1"),))
    found = _difference(one, OperationRequest("step", (), other))
    assert found == words and _difference(one, one) is None


def test_names_that_come_once_take_no_room() -> None:
    ranks = _Ranks(1, numbered=True)
    for at in range(20_000):
        ranks.announce(0, [f"loss {at}"])
    assert len(ranks.take_answers()) == 20_000
    assert len(ranks.coordinator._once) <= 4096 and not ranks.coordinator.numbers.ready


def test_what_waits_by_name_and_by_number_is_one_operation() -> None:
    ranks = _Ranks(3, numbered=True)
    for _ in range(2):
        for rank in range(3):
            ranks.announce(rank, ["a"])
        ranks.on_message()
    orders: list[list[Item]] = [[("a", _ASKED), 0, 0], [0, ("a", _ASKED), 0], [0, 0, ("a", _ASKED)]]
    for order in orders:
        for rank, item in enumerate(order):
            assert not ranks.coordinator.answers
            ranks.coordinator.announce(1 << rank, [item], 0.0)
        assert ranks.on_message() == ["ready a ()"]


def test_a_rank_that_has_gone_fails_what_waits_by_number() -> None:
    ranks = _Ranks(3, numbered=True)
    for _ in range(2):
        for rank in range(3):
            ranks.announce(rank, ["a"])
        ranks.on_message()
    ranks.announce(0, ["a"])
    assert ranks.by_number == 1 and not ranks.on_message()
    ranks.coordinator.leave(2, "rank 2 has gone")
    (failed,) = ranks.take_answers()
    assert isinstance(failed, Failed) and "rank 2 has gone, but a waits for it on rank 0" in failed.why


def test_all_that_wait_are_ready_when_the_last_one_joins() -> None:
    ranks = _Ranks(2, numbered=True)
    for _ in range(2):
        for rank in range(2):
            ranks.announce(rank, ["a"])
        ranks.on_message()
    ranks.announce(0, ["a"])
    ranks.join(1)
    assert ranks.on_message() == ["ready a (1,)"]
    ranks.join(0)
    assert isinstance(ranks.take_answers()[0], AllJoined)


def test_a_stalled_job_that_goes_on_is_told_how_to_see_its_stacks_and_one_that_ends_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HVDKIT_JOB", "77@here")
    coordinator = Coordinator(2, _who)
    coordinator.announce(1 << 0, [("loss", _ASKED)], 0.0)
    for now, limit in ((3.0, 0.0), (6.0, 5.0)):
        config = read_config({"HVDKIT_STALL_CHECK_S": "2", "HVDKIT_STALL_SHUTDOWN_S": f"{limit:g}"})
        stalls = Stalls(config, _who, clock=functools.partial(float, now))
        stalls.on_message(1, "  in save\n")
        stalls.check(coordinator, ask=lambda rank: None)
    (warning,) = caplog.messages
    (failed,) = coordinator.answers
    assert isinstance(failed, Failed)
    assert "run `hvdkit stacks 77` on here" in warning and "hvdkit stacks" not in str(failed)
    for said in (warning, str(failed)):
        assert "rank 1" in said and "in save" in said
