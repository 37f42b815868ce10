"""Buckets in device memory, reduced by NCCL: see Buckets. Nothing here lets the host wait but finished()'s callers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from hvdkit.errors import HvdkitError, TransportError
from hvdkit.transport.buckets import BucketSpec, InPlaceSegment
from hvdkit.transport.buffer import COMPLEX, Buffer
from hvdkit.transport.device import Event
from hvdkit.transport.nccl.communicator import Communicator
from hvdkit.transport.nccl.group import DeviceGroup
from hvdkit.transport.nccl.library import OPERATIONS, REDUCIBLE

#: New device memory of so many elements of a dtype.
Allocate = Callable[[int, str], Buffer]
_PARTS = {"complex64": "float32", "complex128": "float64"}


class NcclBuckets:
    """See Buckets. All buckets may be in use at once; a bucket's work is ordered by streams.

    start() takes the numbers that the framework's current stream writes to the bucket until then; after wait() that
    stream may read the result. finished() asks the device. Each rank's part is multiplied by both factors before the
    sum, in the bucket's dtype, by the framework: NCCL's own operations that do so are slower where a switch adds up.
    NCCL rounds 16-bit numbers after each addition.

    allocate, scale: the framework's; scale multiplies a buffer in place on the stream that the calling thread gives
    work to, which is current_stream.
    """

    sent_bytes: int

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
        #: Elements of a shard: the memory behind a bucket is padded to a multiple of them.
        self._counts = [-(-spec.count // size) for spec in specs]
        whole = [allocate(count * size, spec.dtype) for count, spec in zip(self._counts, specs, strict=True)]
        self._whole = whole
        self.memory: Sequence[Buffer] = [one.slice(0, spec.count) for one, spec in zip(whole, specs, strict=True)]
        self.depth = len(self._specs)
        self.owned: Sequence[tuple[int, int]] = [(0, 0)] * len(self._specs)
        self.shard: Sequence[tuple[int, int]] = [
            (min(rank * count, spec.count), min((rank + 1) * count, spec.count))
            for count, spec in zip(self._counts, specs, strict=True)
        ]
        self.sent_bytes = sum(2 * (size - 1) * one.nbytes // size for one in whole)
        device = group.device
        self._events: list[tuple[Event, Event]] = [(device.make_event(), device.make_event()) for _ in specs]
        self._under_way: set[int] = set()

    def start(self, index: int, in_place: Sequence[InPlaceSegment] = ()) -> None:
        """See Buckets.start; there are no in-place segments."""
        spec, buffer = self._specs[index], self._whole[index]

        def reduce(communicator: Communicator, stream: int) -> None:
            dtype, width = _as_reals(spec.dtype)
            op, count = OPERATIONS[spec.op], spec.count * width
            communicator.all_reduce(buffer.pointer, buffer.pointer, count, REDUCIBLE[dtype], op, stream)

        self._prescale(index)
        self._run(index, reduce)

    def reduce_scatter(self, index: int, in_place: Sequence[InPlaceSegment] = ()) -> None:
        """See Buckets.reduce_scatter."""
        spec, buffer, count = self._specs[index], self._whole[index], self._counts[index]

        def reduce(communicator: Communicator, stream: int) -> None:
            dtype, width = _as_reals(spec.dtype)
            op = OPERATIONS[spec.op]
            own = buffer.pointer + self._group.rank * count * buffer.itemsize
            communicator.reduce_scatter(buffer.pointer, own, count * width, REDUCIBLE[dtype], op, stream)

        self._prescale(index)
        self._run(index, reduce)

    def all_gather(self, index: int, in_place: Sequence[InPlaceSegment] = ()) -> None:
        """See Buckets.all_gather."""
        spec, buffer, count = self._specs[index], self._whole[index], self._counts[index]

        def gather(communicator: Communicator, stream: int) -> None:
            dtype, width = _as_reals(spec.dtype)
            own = buffer.pointer + self._group.rank * count * buffer.itemsize
            communicator.all_gather(own, buffer.pointer, count * width, REDUCIBLE[dtype], stream)

        self._run(index, gather)

    def _prescale(self, index: int) -> None:
        factor = self._specs[index].prescale * self._specs[index].postscale
        if factor != 1.0:
            self._scale(self.memory[index], factor)

    def _run(self, index: int, body: Callable[[Communicator, int], None]) -> None:
        if index in self._under_way:
            raise RuntimeError(f"bucket {index} is still being reduced or gathered; call wait({index}) first")
        self._group.run(body, self._current_stream(), *self._events[index])
        self._under_way.add(index)

    def advance(self) -> bool:
        """See Buckets.advance: the device needs no driving."""
        return False

    def finished(self, index: int) -> bool:
        """See Buckets.finished; the result is there for all streams then."""
        if index in self._under_way and self._group.reached(self._events[index][1]):
            self._group.check()
            self._under_way.discard(index)
        return index not in self._under_way

    @property
    def busy(self) -> bool:
        """See Buckets.busy."""
        return not all(self.finished(index) for index in list(self._under_way))

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """Let the framework's current stream wait for the bucket. The host does not: raises for earlier failures."""
        if index in self._under_way:
            self._group.join(self._current_stream(), self._events[index][1])
            self._under_way.discard(index)

    def close(self) -> None:
        """See Buckets.close. The framework keeps the memory until its streams have used it."""
        for index in self._under_way:  # the framework may give the memory to others then
            with contextlib.suppress(HvdkitError):
                self._group.device.wait(self._current_stream(), self._events[index][1])
        self._under_way.clear()
        self.memory, self._whole, self.owned, self.shard = [], [], [], []


def _check(spec: BucketSpec) -> None:
    dtype, _ = _as_reals(spec.dtype)
    if spec.wire != "none" or dtype not in REDUCIBLE:
        wire = f" with {spec.wire} on the wire" if spec.wire != "none" else ""
        raise TransportError(f"NCCL cannot reduce {spec.dtype}{wire}; it reduces {', '.join(REDUCIBLE)} as they are.")


def _as_reals(dtype: str) -> tuple[str, int]:
    """The dtype of a number's parts, and how many there are."""
    return (_PARTS[dtype], 2) if dtype in COMPLEX else (dtype, 1)
