"""Buckets in device memory, reduced by NCCL: see Buckets. Only the callers of finished() make the host wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from hvdkit.errors import HvdkitError, TransportError
from hvdkit.transport.buckets import ALLREDUCE, Buckets, BucketSpec, InPlaceSegment, Phases, under_way
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.device import Event
from hvdkit.transport.nccl.communicator import Communicator
from hvdkit.transport.nccl.group import DeviceGroup
from hvdkit.transport.nccl.library import OPERATIONS, REDUCIBLE, as_reals

#: Allocates device memory for a number of elements of a dtype.
Allocate = Callable[[int, str], Buffer]


class NcclBuckets(Buckets):
    """See Buckets. All buckets may be in use at once; streams order the work of a bucket.

    start() takes the numbers that the framework's current stream has written to the bucket by then; after wait() that
    stream may read the result. finished() queries the device. The framework multiplies each rank's numbers by both
    factors before the sum, in the bucket's dtype: NCCL's own operations for that are slower if a switch adds up.
    NCCL rounds 16-bit numbers after each addition.

    group: the device group of the ranks.
    specs: the buckets of the plan.
    allocate: the framework's function that allocates device memory.
    scale: the framework's function that multiplies a buffer in place, on the calling thread's current stream.
    current_stream: returns the calling thread's current stream of the framework.
    """

    def __init__(
        self,
        group: DeviceGroup,
        specs: Sequence[BucketSpec],
        allocate: Allocate,
        scale: Callable[[Buffer, float], None],
        current_stream: Callable[[], int],
    ) -> None:
        self._group, self._specs, self._scale, self._current_stream = group, list(specs), scale, current_stream
        for spec in specs:
            _check(spec)
        size, rank = group.size, group.rank
        #: Elements of a shard of each bucket, whose memory is padded to a multiple of them.
        self._counts = [-(-spec.count // size) for spec in specs]
        whole = [allocate(count * size, spec.dtype) for count, spec in zip(self._counts, specs, strict=True)]
        self._whole = whole
        self.memory = [one.slice(0, spec.count) for one, spec in zip(whole, specs, strict=True)]
        self.depth = len(self._specs)
        self.owned = [(0, 0)] * len(self._specs)
        self.shard = [
            (min(rank * count, spec.count), min((rank + 1) * count, spec.count))
            for count, spec in zip(self._counts, specs, strict=True)
        ]
        self.sent_bytes = sum(2 * (size - 1) * one.nbytes // size for one in whole)
        device = group.device
        self._events: list[tuple[Event, Event]] = [(device.make_event(), device.make_event()) for _ in specs]
        self._under_way: set[int] = set()

    def begin(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> None:
        """See Buckets.begin; in-place segments are not supported."""
        if index in self._under_way:
            raise under_way(index)
        spec, address, shard = self._specs[index], self._whole[index].pointer, self._counts[index]
        dtype, width = as_reals(spec.dtype)
        kind, op = REDUCIBLE[dtype], OPERATIONS[spec.op]
        own = address + self._group.rank * shard * self._whole[index].itemsize

        def enqueue(communicator: Communicator, stream: int) -> None:
            if phases == ALLREDUCE:
                communicator.all_reduce(address, address, spec.count * width, kind, op, stream)
            elif phases.reduce_scatter:
                communicator.reduce_scatter(address, own, shard * width, kind, op, stream)
            else:
                communicator.all_gather(own, address, shard * width, kind, stream)

        factor = spec.prescale * spec.postscale
        if phases.reduce_scatter and factor != 1.0:
            self._scale(self.memory[index], factor)
        self._group.run(enqueue, self._current_stream(), *self._events[index])
        self._under_way.add(index)

    def advance(self) -> bool:
        """See Buckets.advance. It does nothing, because the device makes progress by itself."""
        return False

    def finished(self, index: int) -> bool:
        """See Buckets.finished. All streams may then read the result."""
        if index in self._under_way and self._group.reached(self._events[index][1]):
            self._group.check()
            self._under_way.discard(index)
        return index not in self._under_way

    @property
    def busy(self) -> bool:
        return not all(self.finished(index) for index in list(self._under_way))

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """Make the framework's current stream, not the host, wait for the bucket. Raises for earlier failures."""
        if index in self._under_way:
            self._group.join(self._current_stream(), self._events[index][1])
            self._under_way.discard(index)

    def close(self) -> None:
        """See Buckets.close. The framework keeps the memory until its streams no longer use it."""
        for index in self._under_way:  # afterwards the framework may reuse the memory
            with contextlib.suppress(HvdkitError):
                self._group.device.wait(self._current_stream(), self._events[index][1])
        self._under_way.clear()
        self.memory, self._whole, self.owned, self.shard = [], [], [], []


def _check(spec: BucketSpec) -> None:
    dtype, _ = as_reals(spec.dtype)
    if spec.wire != "none" or dtype not in REDUCIBLE:
        wire = f" with {spec.wire} on the wire" if spec.wire != "none" else ""
        raise TransportError(f"NCCL cannot reduce {spec.dtype}{wire}; it reduces {', '.join(REDUCIBLE)} as they are.")
