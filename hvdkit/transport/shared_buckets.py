"""Buckets in memory that the ranks of a host share: each reduces its own shard straight out of its peers' buckets.

One round of one bucket, two ranks, time downwards ("|" is the training that goes on meanwhile):

    rank 0                                        rank 1
    fill memory                                   |
    show ready                                    fill memory
    |                                             show ready
    shard 0 of both memories -> own shard 0       shard 1 of both memories -> own shard 1
    show reduced                                  show reduced
    read shard 0 here and shard 1 of rank 1       read shard 0 of rank 0 and shard 1 here
    show read                                     show read

Shard i of any memory is read by rank i alone until it is reduced, so its sum can take its place. A memory is filled
again when all ranks have read it. Few pieces of memory, used in turn, stay in the cache that the ranks share: that is
most of the speed.
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
from hvdkit.transport.waiting import Waiting

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
    """What a bucket holds.

    sources: this rank's shard in everyone's memory. out: in its own, where the sum goes. result: each shard where its
    sum is. partial: the host's sum, where it still has to cross to other hosts.
    """

    spec: BucketSpec
    memory: Buffer
    result: tuple[Buffer, ...]
    sources: tuple[Buffer, ...]
    out: Buffer
    partial: Buffer | None


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
        counters = flag_bytes(group.size, 1)
        # ready | reduced | read | memory of rank 0 | memory of rank 1 | ...
        start = 2 * flags + counters
        self._segment = open_segment(group, [start + area] + [area] * (group.size - 1), directory)
        memory, who = self._segment.memory, {"rank": group.rank, "ranks": group.size}
        self._ready = Flags(memory[:flags], count=len(specs), **who)
        self._reduced = Flags(memory[flags : 2 * flags], count=len(specs), **who)
        self._read = Flags(memory[2 * flags : start], count=1, **who)
        self._generation = [0] * len(specs)
        self._acquired = self._released = 0  # buckets, since the beginning
        self._last_use = [0] * self.depth  # of each piece of memory: the count of acquired buckets when it was its turn
        areas = [start + rank * area for rank in range(group.size)]
        #: Of each of the `depth` pieces: each rank's memory.
        self._raw: list[list[NDArray[np.uint8]]] = [
            [memory[at + turn * size : at + (turn + 1) * size] for at in areas] for turn in range(self.depth)
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
            result=tuple(views[rank].slice(*edges) for rank, edges in enumerate(ranges)),
            sources=tuple(view.slice(start, stop) for view in views),
            out=views[self._rank].slice(start, stop),
            partial=make_buffer(stop - start, spec.dtype) if self._crossing and stop > start else None,
        )

    def change(self, index: int, spec: BucketSpec) -> None:
        """Let an idle bucket hold something else that fits; on all ranks alike. The staging area is used so."""
        if self._layouts[index].spec == spec:
            return
        self._layouts[index] = layout = self._lay_out(index, spec)
        self.memory = [*self.memory[:index], layout.memory, *self.memory[index + 1 :]]
        self.result = [*self.result[:index], layout.result, *self.result[index + 1 :]]

    def acquire(self, index: int) -> None:
        """See Buckets.acquire."""
        turn = index % self.depth
        if self._released < self._last_use[turn]:
            raise RuntimeError(
                f"bucket {index} shares memory with one that this rank has not released; that comes first"
            )
        waiting = Waiting(self._check)
        while not self._read.everyone(0, self._last_use[turn]):
            if not self.advance():
                waiting.pause()
        self._acquired += 1
        self._last_use[turn] = self._acquired

    def release(self, index: int) -> None:
        """See Buckets.release."""
        self._released += 1
        self._read.show(0, self._released)

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
        self._read.close()
        self._segment.close()
        self._raw, self._layouts, self.memory, self.result = [], [], [], []


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
