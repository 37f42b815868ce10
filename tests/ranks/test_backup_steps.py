"""hvd.BackupSteps: every step is the average of those gradients that came first, the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ranks import run_ranks
from torch_world import Case, Weights, assert_alike, joined, weights

import hvdkit.torch as hvd
from hvdkit.errors import HorovodInternalError, TransportError
from hvdkit.strategies.backup_steps import QuorumAverager
from hvdkit.strategies.server import FINISH, PUSH


def _gradient(rank: int, step: int) -> NDArray[np.float64]:
    return np.random.RandomState(100 * rank + step).randn(3)


@pytest.mark.parametrize(("size", "drop", "ahead"), [(2, 1, 1), (3, 1, 4), (5, 2, 3), (4, 3, 16)])
def test_ranks_at_random_speeds_get_the_averages_of_those_that_came_first(size: int, drop: int, ahead: int) -> None:
    random, steps = np.random.RandomState(size), 60
    service = QuorumAverager(size, drop, ahead)
    sent, waiting = [0] * size, set[int]()
    seen: list[dict[int, NDArray[Any]]] = [{} for _ in range(size)]
    dropped = [set[int]() for _ in range(size)]
    speeds = random.uniform(0.2, 1.0, size)
    while min(map(len, seen)) < steps:
        for rank in range(size):
            if rank not in waiting and sent[rank] < steps and random.rand() < speeds[rank]:
                sent[rank] += 1
                service.take(rank, PUSH, _gradient(rank, sent[rank]))
                waiting.add(rank)
        for rank, answer in service.answers(waiting).items():
            waiting.discard(rank)
            seen[rank][sent[rank]] = answer.numbers.copy()
            if answer.notes[1]:
                dropped[rank].add(sent[rank])
        assert len(waiting) < size, "all ranks wait"
        assert max(map(len, seen)) - min(map(len, seen)) <= ahead
    for step in range(1, steps + 1):
        used = [rank for rank in range(size) if step not in dropped[rank]]
        assert len(used) >= size - drop
        mean = np.mean([_gradient(rank, step) for rank in used], axis=0)
        for rank in range(size):
            np.testing.assert_array_equal(seen[rank][step], seen[0][step])
            np.testing.assert_allclose(seen[rank][step], mean, rtol=0, atol=1e-12)
    assert any(dropped) and not service._averages


def test_a_step_waits_for_enough_gradients_and_a_rank_hears_how_far_it_is_behind() -> None:
    service = QuorumAverager(3, 1, 2)
    ones = np.ones(1)
    for step in (1, 2):
        service.take(0, PUSH, ones)
        assert not service.answers({0})
        service.take(1, PUSH, 3 * ones)
        assert {rank: (answer.numbers[0], answer.notes) for rank, answer in service.answers({0, 1}).items()} == {
            0: (2.0, (0, 0.0)),
            1: (2.0, (0, 0.0)),
        }, step
    for rank in (0, 1):
        service.take(rank, PUSH, ones)
    assert not service.answers({0, 1})  # rank 2 would be 3 steps behind
    service.take(2, PUSH, 9 * ones)
    answers = service.answers({0, 1, 2})
    assert answers[2].numbers[0] == 2.0 and answers[2].notes == (2, 1.0)
    assert set(answers) == {0, 1, 2}


def test_ranks_that_finish_after_other_numbers_of_steps_are_an_error() -> None:
    service = QuorumAverager(3, 1, 16)
    for _ in range(2):
        for rank in (0, 1):
            service.take(rank, PUSH, np.ones(1))
        service.answers({0, 1})
    service.take(2, FINISH, np.ones(1))
    service.take(0, PUSH, np.ones(1))
    with pytest.raises(TransportError, match=r"ranks \[2\] called optimizer.finish\(\) after 0 steps, but rank 0"):
        service.answers({0, 2})


def test_a_late_rank_that_finishes_before_the_steps_that_were_made_without_it_is_an_error() -> None:
    service = QuorumAverager(3, 1, 16)
    for _ in range(3):
        for rank in (0, 1):
            service.take(rank, PUSH, np.ones(1))
        service.answers({0, 1})
    service.take(2, PUSH, np.ones(1))
    assert set(service.answers({2})) == {2}
    for rank in (0, 1):
        service.take(rank, FINISH, np.ones(1))
    assert not service.answers({0, 1})
    service.take(2, FINISH, np.ones(1))
    with pytest.raises(TransportError, match=r"ranks \[2\] called optimizer.finish\(\) after 1 steps, but rank 0 has"):
        service.answers({0, 1, 2})


CASE = Case("Adam", {"lr": 0.05}, steps=30, clip=0.1)


def _train(slow: Sequence[float], network: str) -> tuple[Weights, int]:
    """All ranks have the same data, so that it does not matter whose gradients are dropped."""
    with joined(network, check_replicas=10):
        model, plain = CASE.make()
        optimizer = hvd.BackupSteps(plain, model.named_parameters(), 1, ahead=3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        for step in range(CASE.steps):
            optimizer.zero_grad()
            if not optimizer.behind:
                time.sleep(slow[hvd.rank()])
                inputs, targets = CASE.batch(step, 0, 1)
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
            else:
                optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CASE.clip)
            optimizer.step()
            schedule.step()
        optimizer.finish()
        return weights(model), optimizer.dropped


@pytest.mark.native("Horovod's core has no messages")
@pytest.mark.ranks
@pytest.mark.parametrize("network", ["auto", pytest.param("mpi", marks=pytest.mark.slow)])
def test_a_late_rank_takes_the_same_steps(network: str) -> None:
    model, optimizer = CASE.make()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    for step in range(CASE.steps):
        optimizer.zero_grad()
        inputs, targets = CASE.batch(step, 0, 1)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CASE.clip)
        optimizer.step()
        schedule.step()
    results = run_ranks(3, _train, [0.0, 0.0, 0.03], network)
    assert_alike([found for found, _ in results], weights(model), 1e-9)
    assert results[2][1] > 0


def _who_contributed() -> list[list[float]]:
    with joined():
        parameters = [torch.nn.Parameter(torch.zeros(hvd.size())), torch.nn.Parameter(torch.zeros(2))]
        optimizer = hvd.BackupSteps(torch.optim.SGD(parameters, 1.0), drop=1, ahead=2)
        changes = []
        for step in range(12):
            time.sleep(0.01 * ((hvd.rank() + step) % 3))
            optimizer.zero_grad()
            before = parameters[0].detach().clone()
            parameters[0][hvd.rank()].backward()  # nobody uses the other one
            optimizer.step()
            changes.append((before - parameters[0].detach()).tolist())
        optimizer.finish()
        assert parameters[1].grad is None
        return changes


@pytest.mark.native("Horovod's core has no messages")
@pytest.mark.ranks
def test_a_step_is_the_average_of_two_or_three_of_three_ranks() -> None:
    results = run_ranks(3, _who_contributed)
    assert results[0] == results[1] == results[2]
    for change in results[0]:
        used = [part for part in change if part]
        assert len(used) in (2, 3) and used == pytest.approx([1 / len(used)] * len(used))


def _refusals() -> list[str]:
    messages = []
    with joined():
        for options in ({"drop": -1}, {"drop": hvd.size()}, {"drop": 0.5}, {"ahead": 0}, {"op": hvd.Sum}):
            _, plain = CASE.make()
            with pytest.raises((ValueError, TypeError)) as caught:
                hvd.BackupSteps(plain, **options)
            messages.append(str(caught.value))
        model, plain = CASE.make()
        optimizer = hvd.BackupSteps(plain, model.named_parameters(), drop=0)
        for _ in range(2 + hvd.rank() // 2):
            optimizer.zero_grad()
            model(CASE.batch(0, 0, 1)[0]).sum().backward()
        optimizer.finish()
    return messages


@pytest.mark.native("Horovod's core has no messages")
@pytest.mark.ranks
def test_what_cannot_be_used_is_refused() -> None:
    for messages in run_ranks(2, _refusals):
        assert "drop is -1" in messages[0] and "at most drop=1" in messages[1] and "integer" in messages[2]
        assert "ahead is 0" in messages[3] and "no argument op" in messages[4]


def _too_few_steps() -> str:
    with joined():
        model, plain = CASE.make()
        optimizer = hvd.BackupSteps(plain, model.named_parameters(), ahead=2)
        with pytest.raises(HorovodInternalError) as caught:
            for _ in range(2 if hvd.rank() == 2 else 9):
                optimizer.zero_grad()
                model(CASE.batch(0, 0, 1)[0]).sum().backward()
                optimizer.step()
            optimizer.finish()
        return str(caught.value)


@pytest.mark.native("Horovod's core has no messages")
@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_with_fewer_batches_ends_all() -> None:
    messages = run_ranks(3, _too_few_steps, fresh=True)
    assert "called optimizer.finish() after 2 steps" in messages[0]
    assert all("has ended" in message for message in messages[1:])
