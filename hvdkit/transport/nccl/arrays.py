"""Arrays in device memory that are reduced where they lie, all of them as one operation of NCCL."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.errors import TransportError
from hvdkit.transport.buffer import COMPLEX, STORAGE
from hvdkit.transport.nccl.communicator import Communicator
from hvdkit.transport.nccl.group import DeviceGroup
from hvdkit.transport.nccl.library import REDUCIBLE

_PARTS = {"complex64": "float32", "complex128": "float64"}


class DeviceArrays:
    """Sums a list of arrays over the ranks of a device group, for a framework that hands over addresses and a stream.

    arrays: of each the dtype and the number of elements, the same on all ranks. factor: each rank's numbers are
    multiplied by it before the sum, in their dtype; 1 for a sum, 1 / size for an average. sent_bytes: of this rank, by
    one reduce(), as a ring sends them.
    Raises TransportError for a dtype that NCCL does not sum.
    """

    def __init__(self, group: DeviceGroup, arrays: Sequence[tuple[str, int]], factor: float) -> None:
        self._group, self._factor = group, factor
        self._arrays: list[tuple[str, int]] = []
        for dtype, count in arrays:
            part = _PARTS[dtype] if dtype in COMPLEX else dtype
            if part not in REDUCIBLE:
                raise TransportError(f"NCCL cannot sum {dtype} on {group.where}; it sums {', '.join(REDUCIBLE)}.")
            self._arrays.append((part, count * (2 if dtype in COMPLEX else 1)))
        self.nbytes = sum(STORAGE[dtype].itemsize * count for dtype, count in arrays)
        self.sent_bytes = 2 * (group.size - 1) * self.nbytes // group.size
        self._ready, self._done = group.device.make_event(), group.device.make_event()

    def reduce(self, sources: Sequence[int], targets: Sequence[int], stream: int) -> None:
        """Enqueue the reduction after what `stream` has been given; what it is given from then on comes after it.

        sources, targets: addresses, in the order of `arrays`; a target may be its source. The host waits for nothing.
        Raises RankLostError or TransportError if an earlier operation has failed, NcclError if NCCL fails.
        """

        def enqueue(communicator: Communicator, own_stream: int) -> None:
            sums = [communicator.scaled_sum(dtype, self._factor) for dtype, _ in self._arrays]
            with communicator.grouped():
                for (dtype, count), op, source, target in zip(self._arrays, sums, sources, targets, strict=True):
                    if count:
                        communicator.all_reduce(source, target, count, REDUCIBLE[dtype], op, own_stream)

        self._group.run(enqueue, stream, self._ready, self._done)
        self._group.join(stream, self._done)
