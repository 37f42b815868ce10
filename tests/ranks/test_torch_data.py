from __future__ import annotations

import json

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd
from hvdkit.log import logger
from hvdkit.torch.data import ShardedSampler, repeated_order
from hvdkit.torch.learning_rate import WarmupSchedule, scale_learning_rate

TEN = range(10)


def samplers(size: int, **arguments: object) -> list[ShardedSampler]:
    return [ShardedSampler(TEN, rank=rank, size=size, **arguments) for rank in range(size)]  # type: ignore[arg-type]


def test_ranks_share_an_epoch_in_equal_parts() -> None:
    shards = [list(sampler) for sampler in samplers(3)]
    assert [len(shard) for shard in shards] == [4, 4, 4]
    assert set().union(*shards) == set(TEN)
    assert [len(sampler) for sampler in samplers(3, uneven="drop")] == [3, 3, 3]


def train(
    sampler: ShardedSampler, *, epochs: int, set_epoch: bool = False, validate: ShardedSampler | None = None
) -> None:
    data = TensorDataset(torch.ones(10, 2))
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    for epoch in range(epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        for _ in DataLoader(data, batch_size=2, sampler=sampler):
            optimizer.step()
        if validate is not None:
            list(DataLoader(data, batch_size=2, sampler=validate))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(repeated_order, "_warned", False)
    monkeypatch.setattr(logger, "propagate", True)
    return caplog


def test_a_second_epoch_in_the_same_order_is_warned_of_once(warnings: pytest.LogCaptureFixture) -> None:
    first, second, _ = samplers(3)
    train(second, epochs=3)
    assert not warnings.messages, "only rank 0 warns"
    repeated_order._warned = False
    train(first, epochs=3)
    assert [
        line for line in warnings.messages if "Call sampler.set_epoch(epoch) before each epoch" in line
    ] == warnings.messages
    assert len(warnings.messages) == 1


def test_other_loops_than_a_training_without_set_epoch_are_not_warned_of(warnings: pytest.LogCaptureFixture) -> None:
    train(samplers(2)[0], epochs=1)
    train(samplers(2)[0], epochs=3, set_epoch=True)
    train(samplers(2, shuffle=False)[0], epochs=2)
    train(samplers(2)[0], epochs=3, set_epoch=True, validate=samplers(2)[0])
    counted = samplers(2)[0]
    assert len(list(counted)) == len(list(counted)), "to know a length"
    train(counted, epochs=1)
    resumed = samplers(2)[0]
    resumed.load_state_dict({"epoch": 1, "used": 4, "seed": 0})
    train(resumed, epochs=1)
    left = samplers(2)[0]
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    for epoch in range(3):
        left.set_epoch(epoch)
        indices = iter(left)  # the iterator of the epoch before ends here, in the midst of that
        next(indices)
        optimizer.step()
    assert not warnings.messages


def test_evaluation_counts_every_sample_once() -> None:
    shards = [list(sampler) for sampler in samplers(4, evaluation=True)]
    assert [index for shard in shards for index in shard] == list(TEN)
    assert [len(shard) for shard in shards] == [3, 3, 2, 2]


def test_an_epoch_is_shuffled_anew_and_repeatably() -> None:
    sampler = ShardedSampler(TEN, rank=0, size=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first != second
    assert list(ShardedSampler(TEN, rank=0, size=1, shuffle=False)) == list(TEN)


def test_a_shard_without_samples_is_reported_when_the_sampler_is_made() -> None:
    with pytest.raises(ValueError, match="uneven='pad'"):
        ShardedSampler(TEN, rank=0, size=11, uneven="drop")


def test_batches_of_all_ranks_are_those_of_one_process() -> None:
    data = TensorDataset(torch.arange(24))
    loaders = [DataLoader(data, batch_size=4, sampler=ShardedSampler(data, rank=rank, size=3)) for rank in range(3)]
    alone = DataLoader(data, batch_size=12, sampler=ShardedSampler(data, rank=0, size=1))
    for (whole,), *parts in zip(alone, *loaders, strict=True):
        assert sorted(torch.cat([part for (part,) in parts]).tolist()) == sorted(whole.tolist())


def test_a_resumed_epoch_goes_on_with_the_next_sample_on_any_number_of_ranks() -> None:
    data = TensorDataset(torch.arange(24))
    before = [ShardedSampler(data, rank=rank, size=2, seed=7) for rank in range(2)]
    seen: list[int] = []
    for sampler in before:
        sampler.set_epoch(5)
        batches = iter(DataLoader(data, batch_size=3, sampler=sampler))
        seen += [index for _ in range(2) for index in next(batches)[0].tolist()]
    state = json.loads(json.dumps(before[0].state_dict()))
    assert state == before[1].state_dict() == {"epoch": 5, "used": 12, "seed": 7}

    for rank in range(3):
        sampler = ShardedSampler(data, rank=rank, size=3)
        sampler.load_state_dict(state)
        sampler.set_epoch(sampler.epoch)
        assert len(sampler) == 4
        seen += list(sampler)
        assert len(sampler) == 8, "the next epoch is whole again"
    assert sorted(seen) == list(range(24))


def test_the_loop_may_say_how_many_samples_it_used() -> None:
    sampler = ShardedSampler(TEN, rank=0, size=2)
    iterator = iter(sampler)
    for _ in range(4):
        next(iterator)
    assert sampler.state_dict()["used"] == 8
    assert sampler.state_dict(given=1)["used"] == 2


def test_what_was_trained_on_counts_where_workers_have_fetched_ahead() -> None:
    sampler = ShardedSampler(range(10), rank=0, size=1)
    assert len(list(sampler)) == 10
    sampler.record_batch(0, 4)
    assert sampler.state_dict() == {"epoch": 0, "used": 4, "seed": 0}
    sampler.record_batch(1, 6)
    assert sampler.state_dict() == {"epoch": 1, "used": 0, "seed": 0}
    assert sampler.state_dict(given=sampler.trained) == {"epoch": 0, "used": 10, "seed": 0}
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "used": 0, "seed": 0}


def test_the_state_after_an_epoch_is_the_start_of_the_next() -> None:
    sampler = ShardedSampler(TEN, rank=0, size=2)
    list(sampler)
    assert sampler.state_dict() == {"epoch": 1, "used": 0, "seed": 0}


def test_an_evaluation_cannot_be_half_done() -> None:
    sampler = ShardedSampler(TEN, rank=0, size=2, evaluation=True)
    next(iter(sampler))
    assert sampler.state_dict()["used"] == 0


def two_groups() -> torch.optim.SGD:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.SGD([{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": torch.tensor(0.02)}])


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_every_param_group_keeps_a_rate_of_its_own() -> None:
    optimizer = two_groups()
    scale_learning_rate(optimizer, 4)
    assert rates(optimizer) == pytest.approx([0.4, 0.08])
    schedule = WarmupSchedule(optimizer, factor=4, warmup_epochs=2, steps_per_epoch=3)
    seen = [rates(optimizer)]
    for _ in range(8):
        optimizer.step()
        schedule.step()
        seen.append(rates(optimizer))
    assert seen[0] == pytest.approx([0.1, 0.02])
    assert seen[3] == pytest.approx([0.25, 0.05])
    assert seen[6] == seen[8] == pytest.approx([0.4, 0.08])


def test_a_warm_up_can_be_saved_and_resumed() -> None:
    optimizer = two_groups()
    schedule = WarmupSchedule(optimizer, factor=2, warmup_epochs=1, steps_per_epoch=4)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    other = two_groups()
    resumed = WarmupSchedule(other, factor=2, warmup_epochs=1, steps_per_epoch=4)
    resumed.load_state_dict(schedule.state_dict())
    other.load_state_dict(optimizer.state_dict())
    other.step()
    resumed.step()
    assert rates(other) == pytest.approx([0.1, 0.02])


def test_scaling_under_a_scheduler_is_an_error() -> None:
    optimizer = two_groups()
    WarmupSchedule(optimizer, factor=2, warmup_epochs=1, steps_per_epoch=4)
    with pytest.raises(ValueError, match="before you create a scheduler"):
        scale_learning_rate(optimizer, 2)


def test_a_warm_up_without_steps_is_an_error() -> None:
    with pytest.raises(ValueError, match="steps_per_epoch is 0"):
        WarmupSchedule(two_groups(), factor=2, warmup_epochs=1, steps_per_epoch=0)


def mean_of_shards(counts: list[int]) -> float:
    """Rank r averages the numbers sum(counts[:r]) up to sum(counts[: r + 1])."""
    hvd.init()
    mine = hvd.metrics.Mean("numbers")
    first = sum(counts[: hvd.rank()])
    for number in range(first, first + counts[hvd.rank()]):
        mine.update(torch.tensor(float(number)))
    mine.update(float("nan"), 0)
    mean = mine.compute()
    mine.reset()
    assert mine.compute() != mine.compute(), "the mean of no samples is nan"
    return mean


@pytest.mark.ranks
@pytest.mark.parametrize("counts", [[4], [5, 2], [1, 0, 6]], ids=str)
def test_a_mean_weights_ranks_by_their_samples(counts: list[int]) -> None:
    for mean in run_ranks(len(counts), mean_of_shards, counts):
        assert mean == (sum(counts) - 1) / 2


def test_a_mean_weights_batches_by_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvd.metrics, "allreduce", lambda tensor, **_: tensor)
    mean = hvd.metrics.Mean()
    mean.update(torch.tensor(1.0), 32)
    mean.update(4.0, 16)
    assert mean.compute() == 2.0
