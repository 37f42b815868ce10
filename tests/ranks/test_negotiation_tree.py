"""Announcements through a tree of ranks: the same answers as without one, and hardly more to do among more ranks."""

from __future__ import annotations

import random
import time
from math import log2

import pytest
import torch
from cases import quick_ones
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from benchmarks.agreement import MOST, SimulatedEngines, agree_on_plan, is_logarithmic, negotiate, start_up
from benchmarks.simulated_ranks import LINK, Cost, run_simulated
from hvdkit.engine.named import engine as named
from hvdkit.engine.named.coordinator import Item, ranks_in
from hvdkit.engine.named.operation import JOINING, WITHDRAWING, OperationRequest
from hvdkit.engine.named.tree import FANOUT, HOLD_S, TreeAggregator, position_in_tree
from hvdkit.engine.planned.agreement import check_agreement
from hvdkit.errors import HorovodInternalError, PlanMismatchError

ASKED = OperationRequest("allreduce", (("float32", (3,)),), (("op", "sum"),))
OTHER = OperationRequest("allreduce", (("float32", (4,)),), (("op", "sum"),))


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(1, 9))
def test_every_rank_has_one_way_to_the_root(size: int, fanout: int) -> None:
    places = [position_in_tree(rank, size, fanout) for rank in range(size)]
    assert places[0].parent == -1 and places[0].stop == size
    for one in places:
        inside = set(range(one.rank + 1, one.stop))
        below = [set(range(first, places[first].stop)) for first in one.children]
        assert set().union(*below) == inside and sum(map(len, below)) == len(inside)
        assert len(one.children) <= fanout
        assert all(places[first].parent == one.rank for first in one.children)
        assert ranks_in(one.ranks) == [one.rank, *sorted(inside)]


def test_a_small_world_is_flat_and_a_large_one_shallow() -> None:
    assert all(position_in_tree(rank, 9).parent == 0 for rank in range(1, 9))
    for size, most in ((10, 2), (73, 2), (585, 3), (1024, 4), (4096, 4)):
        depths = [0] * size
        for rank in range(1, size):
            depths[rank] = depths[position_in_tree(rank, size).parent] + 1
        assert max(depths) == most


def _assert_logarithmic(cost: Cost) -> None:
    assert is_logarithmic(cost), cost
    assert cost.seconds <= MOST * log2(cost.ranks) * (LINK.latency_s + LINK.message_s + LINK.byte_s * cost.nbytes), cost


@pytest.mark.parametrize("size", quick_ones([2, 3, 8, 9, 10, 64, 100, 1024], 3, 8, 9, 100))
def test_agreement_grows_with_the_logarithm_of_the_ranks(size: int) -> None:
    for cost in negotiate(size):
        _assert_logarithmic(cost)


@pytest.mark.parametrize("size", [2, 64, 512])
def test_what_init_gathers_takes_as_many_rounds_as_the_logarithm(size: int) -> None:
    assert is_logarithmic(start_up(size))


@pytest.mark.parametrize("size", [2, 5, 64, 1024])
def test_a_plan_is_agreed_on_in_as_many_rounds_as_the_logarithm(size: int) -> None:
    cost = agree_on_plan(size)
    _assert_logarithmic(cost)
    assert cost.nbytes <= 2 * 64 * (log2(size) + 2), "as many bytes a round among more ranks"


def test_the_measure_sees_what_grows_with_the_ranks() -> None:
    with pytest.raises(AssertionError):
        _assert_logarithmic(negotiate(256, fanout=256)[1])


def test_one_odd_plan_of_many_is_told_to_all_by_its_rank() -> None:
    results, _ = run_simulated(64, lambda transport: check_agreement(transport, f"settings\n{transport.rank == 37}"))
    assert all(isinstance(one, PlanMismatchError) and "rank 37 has True" in str(one) for one in results)


def _nothing_waits(engines: SimulatedEngines) -> bool:
    """Does the root wait for nobody?"""
    coordinator = engines.ranks[0].negotiator._coordinator
    assert coordinator is not None
    return not coordinator.waiting(0.0)


def _play(size: int, fanout: int, seed: int) -> list[list[str]]:
    """Rounds in which ranks announce in some order, disagree, take back, or join; what has been heard in each.

    An operation that its last rank takes back while the others join is ready or not, as the words come to the root: no
    rank can tell which of them was first. So here those words are never under way together; below they are.
    """
    dice, engines = random.Random(seed), SimulatedEngines(size, fanout)
    names = [f"t{at}" for at in range(6)]
    rounds = []
    for turn in range(6):
        before = [len(rank.heard) for rank in engines.ranks]
        odd = dice.choice(names) if dice.random() < 0.3 else ""
        joins = dice.random() < 0.3
        gone = dice.sample(range(size), dice.randrange(1, size)) if joins and size > 1 else []
        fickle = dice.randrange(size)
        last = {*gone, fickle} == set(range(size)) and fickle not in gone
        for rank in dice.sample(range(size), size):
            if dice.random() < 0.2:
                engines.settle()  # whoever comes now comes late
            if rank == fickle:
                engines.announce(rank, [f"wait {turn}"], ASKED)
            for name in names[:3] if rank in gone else dice.sample(names, len(names)):
                engines.announce(rank, [name], OTHER if name == odd and rank == dice.randrange(size) else ASKED)
            if rank in gone:
                engines.announce(rank, [""], JOINING)
            if rank == fickle:
                if last:
                    engines.settle()  # who has joined before is known
                engines.announce(rank, [f"wait {turn}"], WITHDRAWING)
                if last:
                    engines.settle()  # and who joins now comes after it
        engines.settle()
        if gone:
            for rank in set(range(size)) - set(gone):
                engines.announce(rank, [""], JOINING)
            engines.settle()
        heard = [rank.heard[start:] for rank, start in zip(engines.ranks, before, strict=True)]
        assert all(one == heard[0] for one in heard), "all ranks hear the same in the same order"
        rounds.append(sorted(one.partition(":")[0] for one in heard[0] if not one.startswith("joined")))
        assert sum(one.startswith("joined") for one in heard[0]) == bool(gone)
        assert _nothing_waits(engines)
    return rounds


@settings(max_examples=25)
@given(st.integers(2, 24), st.integers(1, 4), st.integers(0, 10**6))
@example(3, 1, 1)  # rank 1 takes back while rank 2 joins: known in this order without a tree, in the other one with it
def test_a_tree_changes_no_answer(size: int, fanout: int, seed: int) -> None:
    assert _play(size, fanout, seed) == _play(size, size, seed)


def _take_back_while_others_join(size: int, fanout: int, seed: int) -> bool:
    """The last rank that works takes back what it waits for, at any moment of the others' joining; was it ready?"""
    dice, engines = random.Random(seed), SimulatedEngines(size, fanout)
    fickle = dice.randrange(size)
    engines.announce(fickle, ["wait"], ASKED)
    for rank in dice.sample(range(size), size):
        dice.choice([lambda: None, engines.wire.run, engines.settle])()  # more or less of it has come everywhere
        if rank == fickle:
            engines.announce(rank, ["wait"], WITHDRAWING)
        else:
            engines.announce(rank, [""], JOINING)
    engines.settle()
    assert _nothing_waits(engines)
    heard = list(engines.ranks[0].heard)
    assert heard in ([], [f"ready wait without {sorted(set(range(size)) - {fickle})}"])
    engines.announce(fickle, [""], JOINING)
    engines.settle()
    for rank in range(size):
        engines.announce(rank, ["wait"], ASKED)
    engines.settle()
    assert all(rank.heard == [*heard, f"joined {fickle}", "ready wait"] for rank in engines.ranks)
    return bool(heard)


@settings(max_examples=50)
@given(st.integers(2, 24), st.integers(1, 4), st.integers(0, 10**6))
@example(19, 1, 310)  # a word that is kept at each of 18 ranks on its way
def test_what_is_taken_back_while_others_join_is_the_same_on_all_ranks(size: int, fanout: int, seed: int) -> None:
    _take_back_while_others_join(size, fanout, seed)


@pytest.mark.parametrize("fanout", [1, 3])
def test_what_is_taken_back_while_others_join_is_ready_or_not(fanout: int) -> None:
    assert {_take_back_while_others_join(3, fanout, seed) for seed in range(50)} == {False, True}


def test_who_is_late_is_known_at_the_root_before_it_comes() -> None:
    engines = SimulatedEngines(100)
    for rank in set(range(100)) - {41}:
        engines.announce(rank, ["x"], ASKED)
    engines.settle()
    coordinator = engines.ranks[0].negotiator._coordinator
    assert coordinator is not None
    (waiting,) = coordinator.waiting(1.0)
    assert waiting.missing == (41,) and len(waiting.present) == 99
    engines.wire.start_counting()
    engines.announce(41, ["x"], ASKED)
    engines.wire.run()
    assert all(rank.heard == ["ready x"] for rank in engines.ranks)
    assert engines.wire.counted().seconds < HOLD_S, "the one that was waited for is not kept anywhere"


def test_rows_that_differ_between_ranks_are_not_kept_anywhere() -> None:
    engines = SimulatedEngines(100)
    engines.wire.start_counting()
    for rank in range(100):
        engines.announce(rank, ["rows"], OperationRequest("allgather", (("float32", (rank, 3)),)))
    engines.wire.run()
    assert all(rank.heard == ["ready rows"] for rank in engines.ranks)
    assert engines.wire.counted().seconds < HOLD_S


def test_what_was_out_of_order_costs_no_more_the_next_time() -> None:
    engines = SimulatedEngines(100)

    def cost(names: list[str]) -> int:
        engines.wire.start_counting()
        for rank in reversed(range(100)):
            engines.announce(rank, names, ASKED)
        engines.settle()
        return engines.wire.counted().messages

    usual = cost(["a", "b"])
    for rank in range(100):
        if rank % 10 == 3:
            engines.settle()  # these come late, one after the other
        engines.announce(rank, ["a"], ASKED)
    engines.settle()
    assert cost(["a", "b"]) == usual
    for rank in range(100):
        engines.announce(rank, [""], JOINING)
    engines.settle()
    assert cost(["a", "b"]) == usual
    for rank in set(range(100)) - {41}:
        engines.announce(rank, ["c"], ASKED)
    engines.settle()
    coordinator = engines.ranks[0].negotiator._coordinator
    assert coordinator is not None
    coordinator.give_up("c", "it has waited too long")
    engines.ranks[0].drive()
    engines.settle()
    assert cost(["c", "d"]) == usual


def test_a_rank_that_has_left_fails_what_others_wait_for_wherever_it_is() -> None:
    for gone in (1, 5, 99):  # 1 speaks for others
        engines = SimulatedEngines(100)
        engines.ranks[gone].negotiator.leave(f"rank {gone} has left")
        engines.settle()
        for rank in set(range(100)) - {gone}:
            engines.announce(rank, ["x"], ASKED)
        engines.settle()
        for rank in set(range(100)) - {gone}:
            assert any(f"rank {gone} has left" in one for one in engines.ranks[rank].heard), rank


def test_when_the_root_leaves_all_are_told_through_the_tree() -> None:
    engines = SimulatedEngines(100)
    engines.wire.start_counting()
    engines.ranks[0].negotiator.leave("rank 0 has left")
    engines.settle()
    assert all(rank.heard == ["closed: rank 0 has left"] for rank in engines.ranks[1:])
    assert engines.wire.counted().messages <= FANOUT + 1


def _work_in_a_chain() -> str:
    """Each rank speaks for all that come after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(named, "FANOUT", 1)
        with joined("mpi"):
            rank, size = hvd.rank(), hvd.size()
            for _ in range(4):
                order = random.sample(range(30), 30)
                handles = {at: hvd.allreduce_async(torch.ones(at), name=f"n{at}", op=hvd.Sum) for at in order}
                assert all(hvd.synchronize(one).tolist() == [size] * at for at, one in handles.items())
            if rank == size - 1:
                time.sleep(4 * HOLD_S)
            assert hvd.allgather(torch.ones(rank)).tolist() == [1.0] * sum(range(size))
            with pytest.raises(HorovodInternalError) as caught:
                hvd.allreduce(torch.ones(5 if rank == 2 else 4), name="t")
            for batch in range(rank):
                made = hvd.allreduce(torch.ones(1), name=f"batch{batch}", op=hvd.Sum)
                assert made.item() == size - 1 - batch
            assert hvd.join() == size - 1
            return str(caught.value)


@pytest.mark.ranks
@pytest.mark.native("the tree is of hvdkit's own engine")
def test_real_ranks_in_a_chain() -> None:
    for message in run_ranks(4, _work_in_a_chain):
        assert "disagree about the shape: rank 0 (host" in message and "rank 2 (host" in message


@given(st.data())
def test_no_announcement_is_lost_or_passed_on_twice_by_a_merger(data: st.DataObject) -> None:
    ranks, now = range(1, 5), 0.0
    merger = TreeAggregator(sum(1 << rank for rank in ranks))
    left = {rank: data.draw(st.permutations(range(3))) for rank in ranks}
    passed_on: list[tuple[int, int]] = []
    while any(left.values()):
        rank = data.draw(st.sampled_from([rank for rank in ranks if left[rank]]))
        merger.announce(1 << rank, [left[rank].pop()], now)
        if data.draw(st.booleans()):
            merger.answered(all_joined=False)  # of another operation
        now += data.draw(st.sampled_from([0.0, 2 * HOLD_S]))
        passed_on += _each(merger.take(now))
    passed_on += _each(merger.take(now + 2 * HOLD_S))
    assert sorted(passed_on) == [(rank, item) for rank in ranks for item in range(3)]


def _each(out: list[tuple[int, list[Item]]]) -> list[tuple[int, int]]:
    return [
        (rank, item)
        for some, items in out
        for rank in range(some.bit_length())
        if some >> rank & 1
        for item in items
        if isinstance(item, int)
    ]
