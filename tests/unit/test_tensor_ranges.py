"""The division of tensors among ranks: every element belongs to one rank, and the halves of a plan are its buckets."""

from __future__ import annotations

import pytest

from hvdkit.engine.planned.plan import Plan, TensorSpec, plan_buckets
from hvdkit.engine.sharding.tensor_ranges import cut_pieces, split_plan

TENSORS = [TensorSpec(f"p{count}", count, "float32") for count in (1, 700, 3, 64, 2001, 16)]


def _plan(fusion_bytes: int) -> Plan:
    return Plan(tuple(TENSORS), tuple(plan_buckets(TENSORS, fusion_bytes)))


def _shards(plan: Plan, size: int, rank: int) -> list[tuple[int, int]]:
    """Equal shares of each bucket, rounded up; the last ranks may have nothing."""
    shares = [-(-bucket.data_count // size) for bucket in plan.buckets]
    return [
        (min(share * rank, bucket.data_count), min(share * (rank + 1), bucket.data_count))
        for share, bucket in zip(shares, plan.buckets, strict=True)
    ]


@pytest.mark.parametrize("fusion_bytes", [1000, 1_000_000])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_each_element_belongs_to_one_rank(size: int, fusion_bytes: int) -> None:
    plan = _plan(fusion_bytes)
    owners: list[list[int]] = [[0] * tensor.count for tensor in TENSORS]
    for rank in range(size):
        for piece in cut_pieces(plan, _shards(plan, size, rank)):
            for element in range(TENSORS[piece.tensor].count)[piece.elements]:
                owners[piece.tensor][element] += 1
    assert all(set(counts) == {1} for counts in owners)


@pytest.mark.parametrize("fusion_bytes", [1000, 1_000_000])
def test_the_first_half_of_a_split_plan_has_the_pieces_and_the_second_half_the_rest(fusion_bytes: int) -> None:
    plan = _plan(fusion_bytes)
    count = len(plan.buckets)
    for rank in range(3):
        shards = _shards(plan, 3, rank)
        split = split_plan(plan, shards)
        assert len(split.buckets) == 2 * count
        own = [
            (slot.tensor, slot.offset, index, slot.start, slot.stop)
            for index, bucket in enumerate(split.buckets[:count])
            for slot in bucket.slots
        ]
        pieces = cut_pieces(plan, shards)
        assert own == [(one.tensor, one.offset, one.bucket, one.in_bucket.start, one.in_bucket.stop) for one in pieces]
        for bucket, mine, others in zip(plan.buckets, split.buckets[:count], split.buckets[count:], strict=True):
            whole = sorted(at for slot in bucket.slots for at in range(slot.start, slot.stop))
            halves = (at for slot in (*mine.slots, *others.slots) for at in range(slot.start, slot.stop))
            assert sorted(halves) == whole
