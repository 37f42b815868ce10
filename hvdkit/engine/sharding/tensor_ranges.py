"""The ranges of tensors in a rank's shards of buckets, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdkit.engine.planned.plan import Plan, Slot


@dataclass(frozen=True)
class TensorRange:
    """Consecutive elements of one tensor that belong to one rank.

    tensor: index of the tensor in the plan.
    offset: the first element, in the order of the tensor's memory.
    count: number of elements.
    bucket: index of the bucket that holds them.
    start: their first element in the bucket.
    """

    tensor: int
    offset: int
    count: int
    bucket: int
    start: int

    @property
    def elements(self) -> slice:
        """The range in the tensor's elements."""
        return slice(self.offset, self.offset + self.count)

    @property
    def in_bucket(self) -> slice:
        """The range in the elements of the bucket's memory."""
        return slice(self.start, self.start + self.count)


def cut_pieces(plan: Plan, shards: Sequence[tuple[int, int]]) -> list[TensorRange]:
    """Return the pieces within a rank's shards. shards: (start, stop) in each bucket, elements of its memory."""
    return [
        TensorRange(slot.tensor, slot.offset, slot.stop - slot.start, index, slot.start)
        for index, (bucket, shard) in enumerate(zip(plan.buckets, shards, strict=True))
        for slot in _within(bucket.slots, *shard)
    ]


def split_plan(plan: Plan, shards: Sequence[tuple[int, int]]) -> Plan:
    """Return a plan with each of n buckets twice: bucket i has this rank's slots, and bucket n + i the other ranks'.

    Both use the memory of bucket i. A TensorSource with this plan fills the first n buckets and drains the last n.
    shards: see cut_pieces().
    """
    own, others = [], []
    for bucket, (start, stop) in zip(plan.buckets, shards, strict=True):
        outside = *_within(bucket.slots, 0, start), *_within(bucket.slots, stop, bucket.data_count)
        own.append(replace(bucket, slots=tuple(_within(bucket.slots, start, stop))))
        others.append(replace(bucket, slots=outside))
    return Plan(plan.tensors, (*own, *others))


def _within(slots: Sequence[Slot], start: int, stop: int) -> list[Slot]:
    """Return the non-empty intersections of slots with [start, stop)."""
    inside = []
    for slot in slots:
        first, last = max(slot.start, start), min(slot.stop, stop)
        if first < last:
            inside.append(Slot(slot.tensor, first, last, slot.offset + first - slot.start))
    return inside
