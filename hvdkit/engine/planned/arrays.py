"""The GradientSource of arrays in host memory: read where they lie, written where they are wanted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hvdkit.engine.groups import Group
from hvdkit.engine.named.collective_step import collective_step
from hvdkit.engine.planned.opening import open_reducer
from hvdkit.engine.planned.plan import Bucket, Plan, TensorSpec, cut_slots
from hvdkit.engine.planned.reducer import BucketReducer, Statistics
from hvdkit.engine.planned.source import Filled
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.strategy import Parameters
from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import InPlaceSegment
from hvdkit.transport.buffer import Array, Buffer


class Targets(Protocol):
    """Where results go: one array (n,) a tensor, of the dtype's storage."""

    def __getitem__(self, index: int, /) -> Array: ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """A slot of a bucket, or the part of one within or outside of the owned shard.

    first: its first element in the bucket. view: its memory there. part: its elements of the tensor. whole: are these
    all of the tensor's? in_place: is it reduced as an in-place segment?
    """

    tensor: int
    first: int
    view: Array
    part: slice
    whole: bool
    in_place: bool


class ArraySource:
    """Reduces arrays that adapters give it, round after round; for those that see tensors as numpy arrays.

    A round: begin(), arrived() for each tensor, in any order and from any thread, finish(). reduce() is all three.

    group: the ranks that train together. tensors: in the order in which all ranks have them. compute_threads: that this
    rank computes with.
    Opened by all ranks together; raises PlanMismatchError where their tensors differ, HorovodInternalError where some
    rank does something else, has left or has joined.
    """

    def __init__(
        self,
        group: Group,
        tensors: Sequence[TensorSpec],
        *,
        options: ReduceOptions,
        compute_threads: int,
        statistics: Statistics,
    ) -> None:
        self._sources: list[Array | None] = [None] * len(tensors)
        self._targets: Targets = ()
        self._unused: set[int] = set()
        self._pieces: dict[int, list[_Piece]] = {}  # of each bucket
        self._in_place: dict[int, set[int]] = {}  # bucket -> first elements of the segments that were reduced in place
        name = f"arrays.{group.engine.count('arrays')}"

        def plan(_: Transport, __: Sequence[int]) -> BucketReducer:
            parameters = Parameters(name, tensors, self, self, compute_threads)
            return open_reducer(group, parameters, options=options, statistics=statistics)

        self._reducer: BucketReducer = collective_step(group.engine, "plan", plan, name=name)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The plan, in the order in which buckets start."""
        return self._reducer.buckets

    @property
    def under_way(self) -> bool:
        """Has a bucket of this round been started?"""
        return self._reducer.under_way

    def begin(self, targets: Targets) -> None:
        """Begin a round. targets: overwritten by the results; they may share memory with the sources."""
        self._targets, self._unused = targets, set()
        self._sources = [None] * len(self._sources)

    def arrived(self, index: int, source: Array | None) -> None:
        """This rank has the tensor: `source`, (n,) in the dtype's storage, or None if it does not use it in this round.

        `source` is read now or in a later call of the round; the caller leaves it alone until then.
        """
        self._sources[index] = source
        self._reducer.arrived(index)

    def finish(self) -> Collection[int]:
        """End the round, with all results in place.

        Returns the indices of the tensors that no rank uses; their targets are left alone.
        Raises RankLostError, with the tensors concerned, if a rank has ended.
        """
        try:
            self._reducer.finish()
        finally:
            self._targets = ()
            self._in_place.clear()
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
        self._pieces.clear()  # the memory stays mapped as long as there are views of it
        self._reducer.close()

    def on_plan(self, plan: Plan) -> None:
        """See GradientSource.on_plan."""
        self._plan = plan
        self._pieces.clear()
        self._in_place.clear()

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> Filled:
        """See GradientSource.fill. An in-place segment is reduced from its source into its target, without a copy."""
        pieces = self._pieces.get(bucket)
        if pieces is None:  # the memory is the same in each round
            pieces = self._pieces[bucket] = self._cut(bucket, memory, owned)
        unused, segments = set(), []
        for piece in pieces:
            source = self._sources[piece.tensor]
            if source is None:
                unused.add(piece.tensor)
                piece.view.fill(0)
            elif piece.in_place:
                segments.append(self._segment(piece, source, memory.dtype))
            else:
                np.copyto(piece.view, source if piece.whole else source[piece.part], casting="no")
        self._in_place[bucket] = {segment.first for segment in segments}
        return Filled(frozenset(unused), segments)

    def _segment(self, piece: _Piece, source: Array, dtype: str) -> InPlaceSegment:
        values, target = source[piece.part], self._targets[piece.tensor][piece.part]
        buffer = Buffer(values, dtype)
        same = target.__array_interface__["data"] == values.__array_interface__["data"]
        return InPlaceSegment(piece.first, buffer, buffer if same else Buffer(target, dtype))

    def drain(self, bucket: int, memory: Buffer, globally_unused: Collection[int]) -> None:
        """See GradientSource.drain."""
        self._unused.update(globally_unused)
        in_place = self._in_place.pop(bucket)
        for piece in self._pieces[bucket]:
            if piece.tensor not in globally_unused and piece.first not in in_place:
                self._targets[piece.tensor][piece.part] = piece.view

    def _cut(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> list[_Piece]:
        pieces = []
        for slot, in_place in cut_slots(self._plan.buckets[bucket].slots, owned, memory.array.itemsize):
            view = memory.array[slot.start : slot.stop]
            part = slice(slot.offset, slot.offset + len(view))
            whole = len(view) == self._plan.tensors[slot.tensor].count
            pieces.append(_Piece(slot.tensor, slot.start, view, part, whole, in_place))
        return pieces
