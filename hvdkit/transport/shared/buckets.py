"""Buckets in memory that the ranks of a host share: each rank adds up its shard of all ranks' buckets, in place.

One allreduce of one bucket, two ranks, time runs down ("|" is the training that continues meanwhile):

    rank 0                                       rank 1
    fill memory                                  |
    show ready                                   fill memory
    |                                            show ready
    shard 0 of both memories -> both memories    shard 1 of both memories -> both memories
    show reduced                                 show reduced
    read memory                                  read memory

Ready and reduced are the two steps of a reduction in place; steps.py says why they are enough, and why the sum can
overwrite its operands. Each bucket is a lane. No other rank reads shard i of rank i's memory, so the tensors themselves
can replace it (in-place segments), and need not be copied in or out.

A reduce-scatter omits the copies to the peers, and an all-gather omits the sums; both keep the steps, so that after
each of them a rank may use all of its memory freely, too.

After a core has read a cache line, it owns the line and can write it cheaply. But it is slow to take a line from a core
that has read it and not written it since: 2 GB/s if the cores are far apart, against 20. Here a core that reads a line
that another core has written is always the next to write it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.between.buckets import WireCrossing
from hvdkit.transport.buckets import (
    BucketSpec,
    InPlaceSegment,
    Phases,
    SteppedBuckets,
    cover,
    plan_memory,
    see_as,
)
from hvdkit.transport.buffer import STORAGE, Buffer, make_buffer
from hvdkit.transport.coding.api import Coder
from hvdkit.transport.coding.coders import open_coder, sent_bytes
from hvdkit.transport.shared.steps import SharedSteps

_ALIGN = 64  # bytes: a cache line


def plan_shards(spec: BucketSpec, shards: int) -> list[tuple[int, int]]:
    """Split the elements of a bucket into `shards` ranges that begin at cache lines; some may be empty.

    If matrices are coded, each range begins with a matrix, and the ranges are as nearly equal as that allows.
    """
    count = spec.count
    if spec.matrices:
        cuts = [0, *(matrix.start for matrix in spec.matrices[1:]), count]
        edges = [min(cuts, key=lambda cut: abs(cut * shards - count * shard)) for shard in range(shards)] + [count]
    else:
        step = _ALIGN // STORAGE[spec.dtype].itemsize
        lines = -(-count // step)
        edges = [min(count, (lines * shard // shards) * step) for shard in range(shards)] + [count]
    return list(itertools.pairwise(edges))


@dataclass(frozen=True)
class _Chunk:
    """A chunk of this rank's shard.

    sources: the chunk of every rank. own: memory for this rank's result. peers: the chunk in the memory of the peers.
    """

    sources: tuple[Buffer, ...]
    own: Buffer
    peers: tuple[Buffer, ...]


@dataclass(frozen=True)
class _Layout:
    """The layout of a bucket.

    views: every rank's memory of the bucket. owned: elements that this rank sums on its host. shard: the elements of
    `owned` that this rank has after a reduce-scatter; on one host all of them. partial: memory for the host's sum of
    `owned` if it must cross to other hosts. coder: codes this sum; None if it is not coded. around: cache of slices of
    the lower and higher ranks' memories, by first element and number of elements.
    """

    spec: BucketSpec
    views: tuple[Buffer, ...]
    owned: tuple[int, int]
    shard: tuple[int, int]
    partial: Buffer | None
    coder: Coder | None
    around: dict[tuple[int, int], tuple[tuple[Buffer, ...], tuple[Buffer, ...]]] = field(default_factory=dict)

    def shard_of(self, partial: Buffer) -> Buffer:
        """Return the elements of `partial` that belong to `shard`."""
        return partial.slice(self.shard[0] - self.owned[0], self.shard[1] - self.owned[0])


class SharedBuckets(SteppedBuckets):
    """Buckets of the ranks of one host; all of them open it together.

    group: transport of the ranks of this host.
    specs: the buckets of the plan.
    arithmetic: adds and casts the numbers.
    check: see SteppedBuckets.
    directory: a memory file system that these ranks share.
    shards: number of ranks of the host that reduce: all of them for one host, else as many as every host has.
    crossing: reduces a shard's sum between hosts; None on one host, and on ranks that reduce no shard.
    depth: see Buckets.
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
        crossing: WireCrossing | None = None,
        depth: int | None = None,
    ) -> None:
        super().__init__(check)
        self._arithmetic = arithmetic
        self._crossing = crossing
        self._rank, self._shards = group.rank, shards
        sizes = [_padded(nbytes) for nbytes in plan_memory(specs, depth)]
        self.depth = len(sizes)
        self._steps = SharedSteps(group, sum(sizes), directory=directory, check=check, lanes=len(specs))
        #: Each rank's memory, for each of the `depth` memory blocks.
        self._raw: list[list[NDArray[np.uint8]]] = [
            [memory[first:last] for memory in self._steps.memory]
            for first, last in itertools.pairwise([0, *itertools.accumulate(sizes)])
        ]
        self._layouts = [self._lay_out(index, spec) for index, spec in enumerate(specs)]
        self.sent_bytes = sum(
            sent_bytes(layout.spec, layout.coder, layout.partial)
            for layout in self._layouts
            if layout.partial is not None
        )
        self._show_layouts()

    def _lay_out(self, index: int, spec: BucketSpec) -> _Layout:
        # Ranges between matrices are uneven, so ranks rotate them from bucket to bucket.
        turn = index if spec.matrices else 0
        owned = (0, 0)
        if self._rank < self._shards:
            owned = plan_shards(spec, self._shards)[(self._rank + turn) % self._shards]
        views = tuple(see_as(raw, spec) for raw in self._raw[index % self.depth])
        partial = make_buffer(owned[1] - owned[0], spec.dtype) if self._crossing and owned[1] > owned[0] else None
        coder = None if partial is None else open_coder(spec, owned)
        shard = owned
        if self._crossing is not None:
            start, stop = self._crossing.shard(owned[1] - owned[0])
            shard = owned[0] + start, owned[0] + stop
        return _Layout(spec, views, owned, shard, partial, coder)

    def _cut(self, layout: _Layout, in_place: Sequence[InPlaceSegment]) -> Iterator[_Chunk]:
        """Yield this rank's shard in chunks."""
        for segment in cover(layout.views[self._rank], layout.owned, in_place):
            step = layout.spec.chunk_bytes // segment.source.array.itemsize
            for at in range(0, segment.source.count, step):
                stop = min(at + step, segment.source.count)
                part = segment.source.slice(at, stop)
                target = part if segment.target is segment.source else segment.target.slice(at, stop)
                below, above = self._around(layout, segment.first + at, stop - at)
                yield _Chunk((*below, part, *above), target, below + above)

    def _around(self, layout: _Layout, first: int, count: int) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
        """Return the peers' slices of these elements; cached, because all rounds are cut in the same way."""
        known = layout.around.get((first, count))
        if known is None:
            slices = [view.slice(first, first + count) for view in layout.views]
            known = layout.around[first, count] = tuple(slices[: self._rank]), tuple(slices[self._rank + 1 :])
        return known

    def _show_layouts(self) -> None:
        self.memory = [layout.views[self._rank] for layout in self._layouts]
        self.owned = [layout.owned for layout in self._layouts]
        self.shard = [layout.shard for layout in self._layouts]

    def change(self, index: int, spec: BucketSpec) -> None:
        """Give an idle bucket another spec that fits its memory, the same on all ranks; for the staging area."""
        if self._layouts[index].spec == spec:
            return
        self._layouts[index] = self._lay_out(index, spec)
        self._show_layouts()

    def steps(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> Iterator[bool]:
        """See SteppedBuckets. Shows the bucket ready at once.

        Raises TransportError if the last reduction of the bucket was interrupted after that.
        """
        if self._steps.shown[index] % 2:
            raise TransportError(
                f"the last reduction of bucket {index} was interrupted before its end, for example by the handler of a "
                "signal, so the ranks are not at the same step. Let the error that interrupted it end the script."
            )
        return self._reduce(index, self._steps.show(index), in_place, phases)

    def _reduce(self, index: int, ready: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> Iterator[bool]:
        """Sum this rank's shard or copy it to the peers once all are ready, then wait for the other shards."""
        layout = self._layouts[index]
        spec = layout.spec
        free = self._crossing is None  # the order of buckets matters only for collectives between hosts
        while not self._steps.everyone(index, ready):
            yield free
        chunks = list(self._cut(layout, in_place))
        if layout.partial is None or self._crossing is None:
            for chunk in chunks:
                if phases.reduce_scatter:
                    self._arithmetic.combine(chunk.own, chunk.sources, spec.op, spec.prescale * spec.postscale)
                if phases.all_gather:
                    _hand_out(chunk, self._arithmetic)
        else:
            partial, shard = layout.partial, self.memory[index].slice(*layout.shard)
            ends = itertools.accumulate(chunk.own.count for chunk in chunks)
            parts = [partial.slice(end - chunk.own.count, end) for chunk, end in zip(chunks, ends, strict=True)]
            if phases.reduce_scatter:
                for part, chunk in zip(parts, chunks, strict=True):
                    self._arithmetic.combine(part, chunk.sources, spec.op, spec.prescale)
            else:
                self._arithmetic.copy(layout.shard_of(partial), shard)
            yield from self._crossing(partial, spec, phases=phases, coder=layout.coder)
            if phases.all_gather:
                for part, chunk in zip(parts, chunks, strict=True):
                    self._arithmetic.copy(chunk.own, part)
                    _hand_out(chunk, self._arithmetic)
            else:
                self._arithmetic.copy(shard, layout.shard_of(partial))
        reduced = self._steps.show(index)
        while not self._steps.everyone(index, reduced):
            yield True

    def close(self) -> None:
        idle = not self.busy
        super().close()
        if self._crossing is not None:
            self._crossing.close(idle=idle)
        self._steps.close()
        self._raw, self._layouts, self.memory, self.owned, self.shard = [], [], [], [], []


def _hand_out(chunk: _Chunk, arithmetic: Arithmetic) -> None:
    for peer in chunk.peers:
        arithmetic.copy(peer, chunk.own)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
