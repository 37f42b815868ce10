"""The TensorSource of arrays in host memory; input and output arrays may differ."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hvdkit.engine.planned.plan import Plan, cut_slots
from hvdkit.engine.planned.source import Filled
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.buckets import InPlaceSegment
from hvdkit.transport.buffer import Array, Buffer


class Targets(Protocol):
    """The output arrays: one array (n,) a tensor, in the dtype's storage."""

    def __getitem__(self, index: int, /) -> Array: ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """A slot of a bucket, or the range of a slot inside or outside the owned shard.

    tensor: index of the tensor.
    first: its first element in the bucket.
    view: its memory in the bucket.
    part: the range of the tensor's elements.
    whole: Does it contain all elements of the tensor?
    in_place: Is it reduced as an in-place segment?
    """

    tensor: int
    first: int
    view: Array
    part: slice
    whole: bool
    in_place: bool


class ArraySource:
    """A TensorSource of arrays that an adapter passes for one round: gradients, or the values of parameters.

    A round: begin(), put() for each array, and finish() after the last fill() and drain().

    count: number of tensors. complete: Must every tensor have an array when it is read? Then a missing array is an
    error; otherwise its tensor counts as not used by this rank.
    """

    def __init__(self, count: int, *, complete: bool = False) -> None:
        self._sources: list[Array | None] = [None] * count
        self._targets: Targets = ()
        self._complete = complete
        self._unused: set[int] = set()
        self._drained: set[int] = set()
        self.plan = Plan((), ())
        self._pieces: dict[int, list[_Piece]] = {}  # of each bucket
        self._tensors: dict[int, frozenset[int]] = {}  # of each bucket
        self._in_place: dict[int, set[int]] = {}  # bucket -> first elements of the segments that were reduced in place

    def begin(self, targets: Targets) -> None:
        """Begin a round. targets: overwritten with the results; they may share memory with the sources."""
        self._targets = targets
        self._unused, self._drained = set(), set()

    def put(self, index: int, source: Array | None) -> None:
        """Pass an array, (n,) in the dtype's storage, or None if this rank does not use the tensor in this round.

        It is read now or in a later call of the round; the caller must not change it until then.
        """
        self._sources[index] = source

    def finish(self) -> Collection[int]:
        """End the round with all results in the targets; tensors that were not drained are copied from their sources.

        Returns the indices of the tensors that no rank uses; their targets are unchanged.
        """
        unused = self._unused
        if len(self._drained) < len(self._sources):
            for index in {*range(len(self._sources))} - self._drained:
                source = self._sources[index]
                if source is None:
                    unused.add(index)
                else:
                    np.copyto(self._targets[index], source, casting="no")
        self.abandon()
        return unused

    def abandon(self) -> None:
        """Drop the references to the round's arrays."""
        self._targets = ()
        self._sources = [None] * len(self._sources)
        self._in_place.clear()

    def on_plan(self, plan: Plan) -> None:
        self.plan = plan
        self._pieces.clear()
        self._tensors.clear()
        self._in_place.clear()

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> Filled:
        """Implement TensorSource.fill(). In-place segments are reduced from source to target, without a copy."""
        pieces = self._pieces.get(bucket)
        if pieces is None:  # the memory is the same in each round
            pieces = self._pieces[bucket] = self._cut(bucket, memory, owned)
            self._tensors[bucket] = frozenset(piece.tensor for piece in pieces)
        unused, segments = set(), []
        for piece in pieces:
            source = self._sources[piece.tensor]
            if source is None:
                if self._complete:
                    raise HorovodInternalError(_NOT_READABLE)
                unused.add(piece.tensor)
                piece.view.fill(0)
            elif piece.in_place:
                segments.append(self._segment(piece, source, memory.dtype))
            else:
                np.copyto(piece.view, source if piece.whole else source[piece.part], casting="no")
        self._in_place[bucket] = {segment.first for segment in segments}
        return Filled(frozenset(unused), segments)

    def _segment(self, piece: _Piece, source: Array, dtype: str) -> InPlaceSegment:
        values, target = source[piece.part], self.target_of(piece.tensor, piece.part)
        buffer = Buffer(values, dtype)
        same = target.__array_interface__["data"] == values.__array_interface__["data"]
        return InPlaceSegment(piece.first, buffer, buffer if same else Buffer(target, dtype))

    def target_of(self, tensor: int, part: slice) -> Array:
        """Return the target of an in-place segment; subclasses may override it. part: its elements of the tensor."""
        return self._targets[tensor][part]

    def in_place(self, bucket: int) -> Collection[int]:
        """Return the first elements of the in-place segments of a bucket in this round."""
        return self._in_place[bucket]

    def drain(self, bucket: int, memory: Buffer, globally_unused: Collection[int]) -> None:
        if not self._targets:
            raise HorovodInternalError(_NOT_WRITABLE)
        self._unused.update(globally_unused)
        self._drained |= self._tensors[bucket]
        in_place = self._in_place.pop(bucket)
        for piece in self._pieces[bucket]:
            if piece.tensor not in globally_unused and piece.first not in in_place:
                self._targets[piece.tensor][piece.part] = piece.view

    def _cut(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> list[_Piece]:
        pieces = []
        for slot, in_place in cut_slots(self.plan.buckets[bucket].slots, owned, memory.array.itemsize):
            view = memory.array[slot.start : slot.stop]
            part = slice(slot.offset, slot.offset + len(view))
            whole = len(view) == self.plan.tensors[slot.tensor].count
            pieces.append(_Piece(slot.tensor, slot.start, view, part, whole, in_place))
        return pieces


_NOT_READABLE = (
    "A strategy read parameter values where they are not available. On TensorFlow and JAX they can be read only in "
    "attach(), before_step() and after_step(), and only by a strategy with uses_values = True."
)
_NOT_WRITABLE = (
    "A strategy wrote gradients outside of before_step(), or parameter values outside of after_step(). On TensorFlow "
    "and JAX they can be written only there."
)
