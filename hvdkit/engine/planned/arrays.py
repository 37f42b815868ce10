"""Arrays in host memory, reduced together again and again: read where they lie, written where they are wanted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from hvdkit.engine import runtime as engine
from hvdkit.engine.groups import MemberGroup
from hvdkit.engine.named.collective_step import collective_step
from hvdkit.engine.planned.opening import open_reducer
from hvdkit.engine.planned.plan import Bucket, Slot, TensorSpec, cut_slots
from hvdkit.engine.planned.reducer import BucketReducer, Statistics
from hvdkit.engine.planned.source import Filled
from hvdkit.engine.request import ReduceOptions
from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import InPlaceSegment
from hvdkit.transport.buffer import Array, Buffer


class Targets(Protocol):
    """Where results go: one array (n,) a tensor, of the dtype's storage."""

    def __getitem__(self, index: int, /) -> Array: ...


class ArraySource:
    """Dense arrays in buckets; for adapters that see their framework's tensors as numpy arrays.

    A round: begin(), arrived() for each tensor, in any order and from any thread, finish(). reduce() is all three.

    group: the ranks that train together. tensors: in the order in which all ranks have them. compute_threads: that this
    rank computes with.
    Opened by all ranks together; raises PlanMismatchError where their tensors differ, HorovodInternalError where some
    rank is elsewhere, has left or has joined.
    """

    def __init__(
        self,
        group: MemberGroup,
        tensors: Sequence[TensorSpec],
        *,
        options: ReduceOptions,
        compute_threads: int,
        statistics: Statistics,
    ) -> None:
        self._sources: list[Array | None] = [None] * len(tensors)
        self._targets: Targets = ()
        self._unused: set[int] = set()
        self._cuts: dict[int, list[tuple[Slot, bool]]] = {}
        self._stayed: dict[int, set[int]] = {}  # bucket -> first elements of what was reduced in its target
        made = engine.runtime("a reduction of gradients")
        name = f"arrays.{group.engine.count('arrays')}"

        def plan(_: Transport, __: Sequence[int]) -> BucketReducer:
            return open_reducer(
                made,
                group,
                name,
                tensors,
                self,
                options=options,
                compute_threads=compute_threads,
                statistics=statistics,
            )

        self._moving: BucketReducer = collective_step(group.engine, "plan", plan, name=name)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The plan, in the order in which buckets start."""
        return self._moving.buckets

    @property
    def under_way(self) -> bool:
        """Has a bucket of this round been started?"""
        return self._moving.under_way

    def begin(self, targets: Targets) -> None:
        """Begin a round. targets: overwritten by the results; they may share memory with the sources."""
        self._targets, self._unused = targets, set()
        self._sources = [None] * len(self._sources)

    def arrived(self, index: int, source: Array | None) -> None:
        """This rank has the tensor, (n,) in the dtype's storage, or will not have it: None.

        It is read now or in a later call of the round, and left alone until then.
        """
        self._sources[index] = source
        self._moving.arrived(index)

    def finish(self) -> Collection[int]:
        """End the round, with all results in place.

        Returns the indices of what no rank had; their targets are left alone.
        Raises RankLostError, with the tensors concerned, if a rank has ended.
        """
        try:
            self._moving.finish()
        finally:
            self._targets = ()
            self._stayed.clear()
            self._sources = [None] * len(self._sources)
        return self._unused

    def reduce(self, sources: Sequence[Array | None], targets: Targets) -> Collection[int]:
        """Reduce one round of arrays that are all there; see begin(), arrived() and finish()."""
        self.begin(targets)
        for index in reversed(range(len(sources))):
            self.arrived(index, sources[index])
        return self.finish()

    def close(self) -> None:
        """Free the buckets; collective."""
        self._moving.close()

    def on_replan(self) -> None:
        """See GradientSource.on_replan."""
        self._cuts.clear()
        self._stayed.clear()

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> Filled:
        """See GradientSource.fill. What may stay where it is goes from there to its target when it is reduced."""
        unused, in_place = set(), []
        for slot, mine in self._cut(bucket, memory.array.itemsize, owned):
            source = self._sources[slot.tensor]
            if source is None:
                unused.add(slot.tensor)
                memory.array[slot.start : slot.stop] = 0
                continue
            values = source[_part(slot)]
            if mine:
                given = wanted = Buffer(values, memory.dtype)
                target = self._targets[slot.tensor][_part(slot)]
                if target.__array_interface__["data"] != values.__array_interface__["data"]:
                    wanted = Buffer(target, memory.dtype)
                in_place.append(InPlaceSegment(slot.start, given, wanted))
            else:
                np.copyto(memory.array[slot.start : slot.stop], values, casting="no")
        self._stayed[bucket] = {one.first for one in in_place}
        return Filled(frozenset(unused), in_place)

    def drain(self, bucket: int, memory: Buffer, globally_unused: Collection[int]) -> None:
        """See GradientSource.drain."""
        self._unused.update(globally_unused)
        stayed = self._stayed.pop(bucket)
        for slot, _ in self._cuts[bucket]:
            if slot.tensor not in globally_unused and slot.start not in stayed:
                self._targets[slot.tensor][_part(slot)] = memory.array[slot.start : slot.stop]

    def _cut(self, bucket: int, itemsize: int, owned: tuple[int, int]) -> list[tuple[Slot, bool]]:
        """The bucket's slots, cut where `owned` begins and ends; with each, whether it may stay where it is."""
        if bucket not in self._cuts:
            self._cuts[bucket] = cut_slots(self._moving.buckets[bucket].slots, owned, itemsize)
        return self._cuts[bucket]


def _part(slot: Slot) -> slice:
    """The slot's elements of its tensor."""
    return slice(slot.offset, slot.offset + slot.stop - slot.start)
