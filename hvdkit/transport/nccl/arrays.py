"""Arrays in device memory that are reduced where they lie, many of them as one operation of NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdkit.errors import TransportError
from hvdkit.transport.buffer import STORAGE
from hvdkit.transport.nccl.communicator import Communicator
from hvdkit.transport.nccl.group import DeviceGroup
from hvdkit.transport.nccl.library import REDUCIBLE, as_reals

_MOST_TOGETHER = 64  # allreduces in an operation of NCCL


def divide_arrays(nbytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Divide arrays, whole ones, into buckets that end with the one that reaches the limit; the last array comes first.

    nbytes: of each array. Returns the arrays of each bucket, by index.
    """
    buckets: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(nbytes))):
        if buckets[-1] and filled >= limit_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += nbytes[index]
    return buckets


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
            part, width = as_reals(dtype)
            if part not in REDUCIBLE:
                raise TransportError(f"NCCL cannot sum {dtype} on {group.where}; it sums {', '.join(REDUCIBLE)}.")
            self._arrays.append((part, count * width))
        self.nbytes = sum(STORAGE[dtype].itemsize * count for dtype, count in arrays)
        self.sent_bytes = 2 * (group.size - 1) * self.nbytes // group.size
        self._ready, self._done = group.device.make_event(), group.device.make_event()

    def start(self, sources: Sequence[int], targets: Sequence[int], stream: int) -> None:
        """Enqueue the reduction after what `stream` has been given. The host waits for nothing.

        sources, targets: addresses, in the order of `arrays`; a target may be its source.
        Raises RankLostError or TransportError if this or an earlier operation has failed.
        """

        def enqueue(communicator: Communicator, own_stream: int) -> None:
            sums = [communicator.scaled_sum(dtype, self._factor) for dtype, _ in self._arrays]
            calls = [one for one in zip(self._arrays, sums, sources, targets, strict=True) if one[0][1]]
            for first in range(0, len(calls), _MOST_TOGETHER):
                with communicator.grouped():
                    for (dtype, count), op, source, target in calls[first : first + _MOST_TOGETHER]:
                        communicator.all_reduce(source, target, count, REDUCIBLE[dtype], op, own_stream)

        self._group.run(enqueue, stream, self._ready, self._done)

    def join(self, stream: int) -> None:
        """Let what `stream` is given from now on come after the reduction; raises as start() does."""
        self._group.join(stream, self._done)

    def wait(self, pause: Callable[[], object]) -> None:
        """Return when the reduction is done, calling pause() meanwhile; raises as start() does."""
        self._group.wait(self._done, pause)
