"""Buckets in device memory, reduced by a process group of torch: see Buckets. On an accelerator no host waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from hvdkit.errors import HvdkitError, TransportError
from hvdkit.torch.device.calls import allgather, allreduce, reduce_scatter
from hvdkit.torch.device.fixed_order import SumsInOrder
from hvdkit.torch.device.group import TorchGroup, Work
from hvdkit.torch.device.reductions import REDUCIBLE
from hvdkit.torch.tensors import as_tensor
from hvdkit.transport.buckets import ALLREDUCE, Buckets, BucketSpec, InPlaceSegment, Phases, under_way


class TorchBuckets(Buckets):
    """See Buckets. All buckets may be in use at once.

    start() takes the numbers that the current stream has written to the bucket by then; after wait() that stream may
    read the result. finished() queries the device. Each rank's numbers are multiplied by both factors before the sum,
    in the bucket's dtype. A backend may round 16-bit numbers after each addition. With sums="float32" see SumsInOrder:
    the sum is multiplied by both factors, and then rounded to the bucket's dtype.

    group: the process group of the ranks.
    specs: the buckets of the plan.
    sums: "library" for those of the backend, "float32" for those of SumsInOrder; the same for all buckets of a group.
    """

    def __init__(self, group: TorchGroup, specs: Sequence[BucketSpec], sums: str = "library") -> None:
        self._group, self._specs = group, list(specs)
        for spec in specs:
            _check(spec, group.backend.kind)
        size, rank, allocate = group.size, group.rank, group.accelerator.allocate
        #: Elements of a shard of each bucket, whose memory is padded to a multiple of them.
        counts = [-(-spec.count // size) for spec in specs]
        whole = [allocate(count * size, spec.dtype) for count, spec in zip(counts, specs, strict=True)]
        self.memory = [each.slice(0, spec.count) for each, spec in zip(whole, specs, strict=True)]
        self._numbers = [as_tensor(each) for each in self.memory]
        self.depth = len(self._specs)
        self.owned = [(0, 0)] * self.depth
        self.shard = [
            (min(rank * count, spec.count), min((rank + 1) * count, spec.count))
            for count, spec in zip(counts, specs, strict=True)
        ]
        self.sent_bytes = sum(2 * (size - 1) * each.nbytes // size for each in whole)
        ops = [spec.op for spec in specs]
        shards = [each.array[rank * count : (rank + 1) * count] for each, count in zip(whole, counts, strict=True)]
        #: For each bucket the call of each phase with its arguments, made once: a call takes the host 2 us.
        self._reduce = [allreduce(group.backend, [each], op) for each, op in zip(self._numbers, ops, strict=True)]
        self._scatter = [
            reduce_scatter(group.backend, own, each.array, op) for own, each, op in zip(shards, whole, ops, strict=True)
        ]
        self._gather = [allgather(group.backend, own, each.array) for own, each in zip(shards, whole, strict=True)]
        self._ordered = SumsInOrder(group, self._specs, whole) if sums == "float32" else None
        self._works: dict[int, Work] = {}

    def begin(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> None:
        """See Buckets.begin; in-place segments are not supported."""
        if index in self._works:
            raise under_way(index)
        group, spec = self._group, self._specs[index]
        group.accelerator.current_stream()  # raises while it is captured
        factor, ordered = spec.prescale * spec.postscale, self._ordered
        if phases.reduce_scatter and factor != 1.0 and (ordered is None or not ordered.adds(index)):
            self._numbers[index].mul_(factor)
        calls = self._reduce if phases == ALLREDUCE else self._scatter if phases.reduce_scatter else self._gather
        if ordered is None:
            self._works[index] = group.begin(calls[index])
        else:
            self._works[index] = ordered.begin(index, phases, calls[index])

    def advance(self) -> bool:
        """See Buckets.advance. The backend makes progress by itself, except between two operations of a bucket."""
        return False if self._ordered is None else self._ordered.advance()

    def finished(self, index: int) -> bool:
        """See Buckets.finished. All streams may then read the result."""
        work = self._works.get(index)
        if work is not None and self._group.reached(work):
            del self._works[index]
            return True
        return work is None

    @property
    def busy(self) -> bool:
        return not all(self.finished(index) for index in list(self._works))

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """Make the current stream wait for the bucket; on the CPU this thread. Raises for earlier failures."""
        work = self._works.pop(index, None)
        if work is not None:
            self._group.join(work, watch)

    def close(self) -> None:
        """See Buckets.close. torch keeps the memory until its streams no longer use it."""
        for work in self._works.values():  # afterwards the memory may be used again
            with contextlib.suppress(HvdkitError):
                self._group.join(work)
        self._works.clear()
        self._numbers, self._reduce, self._scatter, self._gather, self._ordered = [], [], [], [], None
        self.memory, self.owned, self.shard = [], [], []


def _check(spec: BucketSpec, backend: str) -> None:
    if spec.wire != "none" or spec.dtype not in REDUCIBLE:
        wire = f" with {spec.wire} on the wire" if spec.wire != "none" else ""
        raise TransportError(
            f"{backend.upper()} cannot reduce {spec.dtype}{wire}; it reduces {', '.join(sorted(REDUCIBLE))}."
        )
