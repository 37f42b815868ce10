"""Which part of which parameter is whose: the shards of buckets as pieces of tensors, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdkit.engine.planned.plan import Plan, Slot


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one tensor that belong to one rank.

    tensor: its index among those planned. offset: the first element, in the order of the tensor's memory. count: how
    many. bucket, start: where they lie in the plan's buckets.
    """

    tensor: int
    offset: int
    count: int
    bucket: int
    start: int


def cut_pieces(plan: Plan, shards: Sequence[tuple[int, int]]) -> list[Piece]:
    """The pieces within a rank's shard of each bucket. shards: (start, stop), elements of the bucket's memory."""
    return [
        Piece(slot.tensor, slot.offset, slot.stop - slot.start, index, slot.start)
        for index, (bucket, shard) in enumerate(zip(plan.buckets, shards, strict=True))
        for slot in _within(bucket.slots, *shard)
    ]


def split_plan(plan: Plan, shards: Sequence[tuple[int, int]]) -> Plan:
    """A plan with two buckets for each: number 2i has the slots in this rank's shard of i, number 2i + 1 the others.

    Both lie in bucket i's memory. For a TensorSource that is to fill the one and drain the other.
    """
    halves = []
    for bucket, (start, stop) in zip(plan.buckets, shards, strict=True):
        others = *_within(bucket.slots, 0, start), *_within(bucket.slots, stop, bucket.data_count)
        halves += [replace(bucket, slots=slots) for slots in (tuple(_within(bucket.slots, start, stop)), others)]
    return Plan(plan.tensors, tuple(halves))


def _within(slots: Sequence[Slot], start: int, stop: int) -> list[Slot]:
    """What of the slots lies in [start, stop), without empty ones."""
    inside = []
    for slot in slots:
        first, last = max(slot.start, start), min(slot.stop, stop)
        if first < last:
            inside.append(Slot(slot.tensor, first, last, slot.offset + first - slot.start))
    return inside
