"""The soak test in short, and what it is made of."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import soak_model
import soak_play
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import RanksFailedError, run_ranks
from soak import GROWTH, growth
from soak_model import expected, find_difference
from soak_plan import Round, Step, Task, plan_round
from torch_world import joined

import hvdkit.torch as hvd

_SEED = 20261121
_ROUNDS = 80


def _play_rounds(seed: int, count: int) -> float:
    with joined():
        return soak_play.play_rounds(seed, 0, count, hvd.size())["operations"]


@pytest.mark.slow
def test_random_operations_give_what_numpy_says() -> None:
    done = run_ranks(3, _play_rounds, _SEED, _ROUNDS, timeout=100)
    assert min(done) > 10 * _ROUNDS


def _play(round_: Round) -> None:
    with joined():
        soak_play.play(round_, salt=0)


# What Hypothesis draws it can also make smaller: a failure is shown as the smallest round that fails.
@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False))
def test_whatever_hypothesis_draws_gives_what_numpy_says(dice: Random) -> None:
    run_ranks(3, _play, plan_round(dice, 3), timeout=30)


def _play_wrong(rounds: int) -> None:
    """As _play_rounds, but rank 1 gives other numbers than it should to one operation."""

    def given_wrong(task: Task, tensor: int, member: int, salt: int) -> Any:
        values = soak_model.given(task, tensor, member, salt)
        wrong = task.kind == "allreduce" and task.op == "Sum" and task.members[member] == 1
        return values + 1 if wrong else values

    with joined(), patch("soak_play.given", given_wrong):
        soak_play.play_rounds(_SEED, 0, rounds, hvd.size())


def test_a_mismatch_names_the_numbers_and_how_to_repeat_it() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(3, _play_wrong, _ROUNDS, timeout=60)
    message = str(failed.value)
    assert "numbers are wrong; at " in message
    assert f"python tests/support/soak.py --ranks 3 --seed {_SEED} --round " in message


def test_every_rank_draws_the_same_rounds() -> None:
    assert plan_round(Random("4 2"), 3) == plan_round(Random("4 2"), 3)
    assert plan_round(Random("4 2"), 3) != plan_round(Random("4 3"), 3)


def test_the_rounds_hold_everything_that_is_to_be_tried() -> None:
    rounds = [plan_round(Random(f"{_SEED} {number}"), 3) for number in range(_ROUNDS)]
    tasks = [task for one in rounds for task in one.tasks]
    assert {task.kind for task in tasks} == {
        "allreduce",
        "allgather",
        "broadcast",
        "alltoall",
        "reducescatter",
        "barrier",
    }
    assert {task.op for task in tasks} == {"Average", "Sum", "Min", "Max", "Product", "Adasum"}
    assert len({dtype for task in tasks for dtype in task.dtypes}) == 13
    assert len({task.members for task in tasks}) == 7  # every set of the ranks 0, 1, 2 but the empty one
    assert {task.layout for task in tasks} == {"contiguous", "transposed", "strided"}
    sizes = [int(np.prod(shape)) for task in tasks for shape in task.shapes]
    assert min(sizes) == 0 and max(sizes) > 300_000
    assert {len(one.threads) for one in rounds} == {1, 2, 3}
    steps = [step for one in rounds for steps in one.threads for step in steps]
    assert any(step.blocking for step in steps) and any(len(step.tasks) > 10 for step in steps)
    assert any(task.grouped for task in tasks) and any(task.in_place for task in tasks)
    assert any(not task.name for task in tasks) and any(sum(each) == 0 for task in tasks for each in task.splits)


def test_the_model_knows_what_each_member_gets() -> None:
    reduced = Task(1, "allreduce", "a", (0, 2), ("int32",), ((5,),), op="Average", factors=(0.5, 1.0))
    assert [each.tolist() for each in expected(reduced, 0, salt=1)] == [
        each.tolist() for each in expected(reduced, 2, salt=1)
    ]
    scattered = Task(1, "reducescatter", "a", (0, 1, 2), ("float32",), ((5, 2),))
    assert [expected(scattered, rank, salt=1)[0].shape for rank in range(3)] == [(2, 2), (2, 2), (1, 2)]
    turned = Task(1, "alltoall", "a", (0, 1), ("int32",), ((3,),), rows=((3, 2),), splits=((1, 1), (0, 2)))
    assert [expected(turned, rank, salt=1)[0].shape for rank in range(2)] == [(1,), (3,)]


def test_a_difference_is_told_with_its_place() -> None:
    wanted = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert find_difference(wanted, wanted, "int32") == ""
    assert find_difference(wanted * (1 + 1e-7), wanted, "float32") == ""
    assert "1 of 4 numbers are wrong; at 2 it has" in find_difference(
        np.array([[1.0, 2.0], [4.0, 4.0]]), wanted, "float32"
    )
    assert find_difference(np.full((2, 2), np.nan), wanted, "float32")
    assert "shape" in find_difference(wanted[0], wanted, "int32")


def test_growth_is_that_of_the_rank_that_grew_most() -> None:
    assert growth([100.0, 200.0], [101.0, 220.0]) == pytest.approx(0.1)
    assert growth([100.0], [99.0]) < 0 < GROWTH


def test_a_step_is_one_call_or_several_that_are_begun_together() -> None:
    for number in range(_ROUNDS):
        for steps in plan_round(Random(number), 4).threads:
            for step in steps:
                assert isinstance(step, Step) and (len(step.tasks) == 1 or not step.blocking)
