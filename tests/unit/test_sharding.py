from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdkit.training.sharding import plan_order, split_for_evaluation, split_for_training

LENGTHS = st.integers(0, 200)
SIZES = st.integers(1, 9)


@given(LENGTHS, st.integers(0, 2**32), st.integers(0, 1000))
def test_an_order_holds_every_sample_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(plan_order(length, seed=seed, epoch=epoch)) == list(range(length))


def test_the_order_is_the_same_for_ever() -> None:
    assert plan_order(8, seed=0, epoch=0).tolist() == [6, 3, 5, 0, 7, 2, 1, 4]


def test_epochs_and_seeds_shuffle_differently() -> None:
    orders = {tuple(plan_order(50, seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_without_a_seed_samples_stay_in_order() -> None:
    assert plan_order(5, seed=None, epoch=3).tolist() == [0, 1, 2, 3, 4]


@given(LENGTHS, SIZES, st.integers(0, 3))
def test_padding_gives_every_rank_as_many_and_loses_none(length: int, size: int, epoch: int) -> None:
    order = plan_order(length, epoch=epoch)
    shards = [split_for_training(order, rank=rank, size=size) for rank in range(size)]
    assert {len(shard) for shard in shards} == {-(-length // size)}
    counts = Counter(np.concatenate(shards).tolist())
    assert set(counts) == set(range(length))
    assert sum(counts.values()) - length < size


@given(LENGTHS, SIZES)
def test_dropping_gives_every_rank_as_many_and_repeats_none(length: int, size: int) -> None:
    assume(length == 0 or length >= size)
    order = plan_order(length)
    shards = [split_for_training(order, rank=rank, size=size, uneven="drop") for rank in range(size)]
    assert {len(shard) for shard in shards} == {length // size}
    assert max(Counter(np.concatenate(shards).tolist()).values(), default=1) == 1


def test_another_word_than_pad_or_drop_is_an_error() -> None:
    with pytest.raises(ValueError, match="uneven is 'dorp'; it must be 'pad' or 'drop'"):
        split_for_training(plan_order(8), rank=0, size=3, uneven="dorp")  # type: ignore[arg-type]


def test_dropping_everything_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"3 samples .* 4 ranks, .* use uneven='pad'"):
        split_for_training(plan_order(3), rank=0, size=4, uneven="drop")


@given(SIZES, st.integers(1, 8), st.integers(1, 5))
def test_a_step_of_all_ranks_is_the_batch_of_one_process(size: int, batch: int, steps: int) -> None:
    order = plan_order(size * batch * steps)
    shards = [split_for_training(order, rank=rank, size=size) for rank in range(size)]
    for step in range(steps):
        joined = np.concatenate([shard[step * batch : (step + 1) * batch] for shard in shards])
        alone = order[step * batch * size : (step + 1) * batch * size]
        assert sorted(joined) == sorted(alone)


@given(st.integers(1, 200), SIZES, SIZES, st.data())
def test_an_epoch_resumed_by_other_ranks_uses_the_rest(
    length: int, size: int, new_size: int, data: st.DataObject
) -> None:
    order = plan_order(length)
    done = data.draw(st.integers(0, length // size))
    used = [split_for_training(order, rank=rank, size=size)[:done] for rank in range(size)]
    rest = [split_for_training(order, rank=rank, size=new_size, start=done * size) for rank in range(new_size)]
    assert len({len(shard) for shard in rest}) == 1
    counts = Counter(np.concatenate(used + rest).tolist())
    assert set(counts) == set(range(length))
    assert sum(counts.values()) - length < new_size


@given(LENGTHS, SIZES)
def test_an_evaluation_sees_every_sample_once_and_in_rank_order(length: int, size: int) -> None:
    order = plan_order(length, seed=None)
    shards = [split_for_evaluation(order, rank=rank, size=size) for rank in range(size)]
    assert np.concatenate(shards).tolist() == list(range(length))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2)])
def test_a_rank_outside_the_world_is_an_error(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=rf"rank is {rank}; .* \(size is {size}\)"):
        split_for_training(plan_order(4), rank=rank, size=size)
    with pytest.raises(ValueError, match=rf"rank is {rank}; .* \(size is {size}\)"):
        split_for_evaluation(plan_order(4), rank=rank, size=size)
