"""Buckets in memory that the ranks of a host share: each reduces its own shard straight out of its peers' buckets.

One generation of one bucket, two ranks, time downwards ("|" is the training that goes on meanwhile):

    rank 0                                 rank 1
    fill memory                            |
    raise ready                            fill memory
    |                                      raise ready
    shard 0 of both memories -> result     shard 1 of both memories -> result
    raise reduced                          raise reduced
    read result (both shards)              read result (both shards)

Buckets i and i + depth share memory. Nobody raises ready for the later one before it has read the result of the earlier
one, so two flags are enough; and a rank that has the result knows that nobody reads its memory any more. Few pieces
of memory, used in turn, stay in the cache that the ranks share: that is most of the speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hvdkit.transport.base import STORAGE, Arithmetic, BucketSpec, Buffer, Transport, make_buffer, plan_depth, see_as
from hvdkit.transport.buckets import SteppedBuckets
from hvdkit.transport.flags import Flags, flag_bytes
from hvdkit.transport.segment import open_segment

_ALIGN = 64  # bytes: a cache line


class Crossing(Protocol):
    """Reduces shards between hosts."""

    def __call__(self, source: Buffer, out: Buffer, spec: BucketSpec) -> Iterator[bool]:
        """Reduce `source`, already prescaled, into `out`, postscaled; steps as in SteppedBuckets."""

    def close(self, *, idle: bool = True) -> None:
        """Give it back; collective. idle: False if a reduction was cut short."""


def plan_shards(count: int, shards: int, itemsize: int) -> list[tuple[int, int]]:
    """Split `count` elements into `shards` ranges that begin at cache lines; the last ones may be empty."""
    step = _ALIGN // itemsize
    lines = -(-count // step)
    edges = [min(count, (lines * shard // shards) * step) for shard in range(shards)] + [count]
    return list(itertools.pairwise(edges))


@dataclass(frozen=True)
class _Layout:
    """What a bucket holds: everyone's own shard of it, where its sum goes, and the whole result."""

    spec: BucketSpec
    memory: Buffer
    result: Buffer
    sources: tuple[Buffer, ...]
    out: Buffer
    partial: Buffer | None  # the host's sum, where it still has to cross to other hosts


class SharedBuckets(SteppedBuckets):
    """Buckets of one host's ranks; opened by all of them together.

    shards: how many ranks of the host reduce: all of them if there is one host, else as many as every host has.
    crossing: takes a shard's sum to the other hosts; for ranks that reduce a shard, where there are several hosts.
    """

    def __init__(
        self,
        group: Transport,
        specs: Sequence[BucketSpec],
        *,
        arithmetic: Arithmetic,
        check: Callable[[], None],
        directory: str,
        shards: int,
        crossing: Crossing | None = None,
        depth: int | None = None,
    ) -> None:
        super().__init__(check)
        self._arithmetic = arithmetic
        self._crossing = crossing
        self._rank, self._shards = group.rank, shards
        self.depth, largest = plan_depth(specs, depth)
        size = _padded(largest)
        flags = flag_bytes(group.size, len(specs))
        area = size * self.depth
        # flags of both kinds | memory of rank 0 | memory of rank 1 | ... | result
        parts = [2 * flags + area] + [area] * (group.size - 1)
        parts[-1] += area
        self._segment = open_segment(group, parts, directory)
        memory = self._segment.memory
        self._ready = Flags(memory[:flags], rank=group.rank, ranks=group.size, count=len(specs))
        self._reduced = Flags(memory[flags : 2 * flags], rank=group.rank, ranks=group.size, count=len(specs))
        self._generation = [0] * len(specs)
        areas = [2 * flags + rank * area for rank in range(group.size + 1)]
        #: Of each of the `depth` pieces: each rank's memory, then the result.
        self._raw: list[list[NDArray[np.uint8]]] = [
            [memory[start + turn * size : start + (turn + 1) * size] for start in areas] for turn in range(self.depth)
        ]
        self._layouts = [self._lay_out(index, spec) for index, spec in enumerate(specs)]
        self.memory = [layout.memory for layout in self._layouts]
        self.result = [layout.result for layout in self._layouts]

    def _lay_out(self, index: int, spec: BucketSpec) -> _Layout:
        views = [see_as(raw, spec) for raw in self._raw[index % self.depth]]
        ranges = plan_shards(spec.count, self._shards, STORAGE[spec.dtype].itemsize)
        start, stop = ranges[self._rank] if self._rank < self._shards else (0, 0)
        return _Layout(
            spec,
            memory=views[self._rank],
            result=views[-1],
            sources=tuple(view.slice(start, stop) for view in views[:-1]),
            out=views[-1].slice(start, stop),
            partial=make_buffer(stop - start, spec.dtype) if self._crossing and stop > start else None,
        )

    def change(self, index: int, spec: BucketSpec) -> None:
        """Let an idle bucket hold something else that fits; on all ranks alike. The staging area is used so."""
        if self._layouts[index].spec == spec:
            return
        self._layouts[index] = layout = self._lay_out(index, spec)
        self.memory = [*self.memory[:index], layout.memory, *self.memory[index + 1 :]]
        self.result = [*self.result[:index], layout.result, *self.result[index + 1 :]]

    def start(self, index: int) -> None:
        """See Buckets.start."""
        self._generation[index] += 1
        self._ready.show(index, self._generation[index])
        super().start(index)

    def steps(self, index: int) -> Iterator[bool]:
        """Reduce this rank's shard once all peers are ready, then wait for the other shards."""
        layout, generation = self._layouts[index], self._generation[index]
        spec = layout.spec
        free = self._crossing is None  # the order of buckets matters to collectives between hosts only
        while not self._ready.everyone(index, generation):
            yield free
        if layout.out.count:
            if layout.partial is None or self._crossing is None:
                self._arithmetic.combine(layout.out, layout.sources, spec.op, spec.prescale * spec.postscale)
            else:
                self._arithmetic.combine(layout.partial, layout.sources, spec.op, spec.prescale)
                yield from self._crossing(layout.partial, layout.out, spec)
        self._reduced.show(index, generation)
        while not self._reduced.everyone(index, generation):
            yield True

    def close(self) -> None:
        """See Buckets.close."""
        idle = not self.busy
        super().close()
        if self._crossing is not None:
            self._crossing.close(idle=idle)
        self._ready.close()
        self._reduced.close()
        self._segment.close()
        self._raw, self._layouts, self.memory, self.result = [], [], [], []


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
