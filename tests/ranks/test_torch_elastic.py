"""TorchState and ElasticSampler, in a world that stays as it is."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.errors import NotInitializedError
from hvdkit.torch.elastic import ElasticSampler, TorchState

pytestmark = pytest.mark.ranks

SIZES = pytest.mark.parametrize("size", [1, 2, 3])


def model_of(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(5, 3, generator=generator)).square().mean().backward()
    optimizer.step()


def snapshot(*things: Any) -> list[Any]:
    """Everything in the state_dicts, as plain Python values."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value

    return [plain(thing.state_dict()) for thing in things]


def synchronized(wrapped: bool) -> list[Any]:
    with joined():
        model = model_of(hvd.rank())
        plain = torch.optim.Adam(model.parameters(), lr=0.01 * (1 + hvd.rank()))
        schedule = torch.optim.lr_scheduler.StepLR(plain, 2 + hvd.rank())
        if hvd.rank() == 0:
            step(model, plain)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters()) if wrapped else plain
        history = [hvd.rank()]
        state = TorchState(model, optimizer, schedule=schedule, epoch=10 + hvd.rank(), history=history)
        state.sync()
        assert state.model is model and state.optimizer is optimizer and state.schedule is schedule
        assert (state.epoch, state.history) == (10, [0])
        found = snapshot(model, optimizer, schedule)

        for seed in range(3):
            step(model, optimizer, seed)
            schedule.step()
        state.epoch, state.history[0] = 20, 5
        assert snapshot(model, optimizer, schedule) != found
        state.restore()
        assert snapshot(model, optimizer, schedule) == found
        assert (state.epoch, state.history) == (10, [0])
        state.restore()
        step(model, optimizer)
        committed = snapshot(model, optimizer, schedule)
        state.epoch = 11
        state.commit()
        step(model, optimizer)
        state.epoch = 12
        state.restore()
        assert snapshot(model, optimizer, schedule) == committed and state.epoch == 11
        return found


@SIZES
@pytest.mark.parametrize("wrapped", [False, True])
def test_ranks_become_alike_and_go_back_to_what_was_committed(size: int, wrapped: bool) -> None:
    results = run_ranks(size, synchronized, wrapped)
    assert all(result == results[0] for result in results)


def two_models() -> None:
    with joined():
        generator, critic = model_of(hvd.rank()), model_of(10 + hvd.rank())
        state = TorchState(generator=generator, critic=critic)
        assert state.model is None and state.optimizer is None
        state.sync()
        assert snapshot(generator, critic) == snapshot(model_of(0), model_of(10))
        replaced = model_of(50 + hvd.rank())
        state.critic = replaced
        state.sync()
        assert snapshot(state.critic) == snapshot(model_of(50)) and state.critic is replaced


@SIZES
def test_models_go_by_any_name_and_may_be_replaced(size: int) -> None:
    run_ranks(size, two_models)


DATA = TensorDataset(torch.arange(23))


def an_interrupted_epoch(committed: int, restored: bool) -> list[list[int]]:
    """The samples of this rank before and after. committed: batches until the commit."""
    with joined():
        sampler = ElasticSampler(DATA, seed=5)
        loader = DataLoader(DATA, batch_size=2, sampler=sampler)
        state = TorchState(sampler=sampler)
        state.sync()
        before: list[int] = []
        for batch_idx, (values,) in enumerate(loader):
            if batch_idx < committed:
                before += values.tolist()
            sampler.record_batch(batch_idx, 2)
            if batch_idx + 1 == committed:
                state.commit()
        assert sampler.processed_num >= len(DATA)
        assert [value for (values,) in loader for value in values.tolist()][
            : len(before)
        ] == before  # as it was planned
        if restored:
            state.restore()
        else:
            sampler.load_state_dict({"epoch": 0, "processed_num": 2 * committed * hvd.size()})
            state.sync()
        after = [value for (values,) in loader for value in values.tolist()]
        assert len(after) == len(sampler)
        sampler.set_epoch(1)
        assert sampler.processed_num == 0 and len(sampler.remaining_indices) == len(DATA)
        return [before, after]


@SIZES
@pytest.mark.parametrize("restored", [True, False])
def test_an_interrupted_epoch_goes_on_with_the_samples_that_are_left(size: int, restored: bool) -> None:
    results = run_ranks(size, an_interrupted_epoch, 2, restored)
    before = [value for result in results for value in result[0]]
    after = [value for result in results for value in result[1]]
    assert len(before) == len(set(before)) == 4 * size
    assert set(before) | set(after) == set(range(23))
    repeated = -(23 - len(before)) % size
    assert len(after) == 23 - len(before) + repeated
    assert len({len(result[1]) for result in results}) == 1


def another_number_of_ranks(processed: int) -> list[int]:
    with joined():
        sampler = ElasticSampler(DATA, shuffle=False)
        sampler.load_state_dict({"epoch": 3, "processed_num": processed})
        assert sampler.state_dict() == {"epoch": 3, "processed_num": processed}
        assert (sampler.rank, sampler.num_replicas) == (hvd.rank(), hvd.size())
        assert sampler.remaining_indices == list(range(processed, 23))
        return list(sampler)


def test_a_state_is_taken_up_by_another_number_of_ranks() -> None:
    assert run_ranks(2, another_number_of_ranks, 15) == [[15, 17, 19, 21], [16, 18, 20, 22]]
    assert run_ranks(3, another_number_of_ranks, 15) == [[15, 18, 21], [16, 19, 22], [17, 20, 0]]
    assert run_ranks(2, another_number_of_ranks, 30) == [[], []]


def orders() -> dict[str, list[int]]:
    with joined():
        first, other = ElasticSampler(DATA, seed=1), ElasticSampler(DATA, seed=7)
        found = {"first": list(first), "other seed": list(other)}
        first.record_indices([1, 2, 3])
        assert first.processed_num == 3 * hvd.size()
        first.set_epoch(1)
        found["next epoch"] = list(first)
        horovods = list(range(23))
        random.Random(1).shuffle(horovods)
        padded = [*horovods, *horovods[: -23 % hvd.size()]]
        assert found["first"] == padded[hvd.rank() :: hvd.size()]
        return found


@SIZES
def test_each_epoch_and_seed_has_its_order_that_of_horovod(size: int) -> None:
    for found in run_ranks(size, orders):
        assert len(set(map(tuple, found.values()))) == 3


def test_a_sampler_needs_to_know_the_world() -> None:
    with pytest.raises(NotInitializedError):
        ElasticSampler(DATA)
