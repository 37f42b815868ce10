"""Reduces arrays in device memory without copies to buckets, many arrays as one operation of NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdkit.errors import TransportError
from hvdkit.transport.buffer import STORAGE
from hvdkit.transport.nccl.communicator import Communicator
from hvdkit.transport.nccl.group import DeviceGroup
from hvdkit.transport.nccl.library import REDUCIBLE, as_reals

_MOST_TOGETHER = 64  # limit of allreduces in one operation (group call) of NCCL


def divide_arrays(nbytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Divide whole arrays into buckets, last array first; a bucket ends with the array that reaches the limit.

    nbytes: bytes of each array. limit_bytes: the limit. Returns the indices of the arrays of each bucket.
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
    """Sums a list of arrays over the ranks of a device group, for a framework that passes addresses and a stream.

    arrays: dtype and number of elements of each array, the same on all ranks. factor: each rank's numbers are
    multiplied by it before the sum, in their dtype; 1 for a sum, 1 / size for an average. sent_bytes: bytes that this
    rank sends in one reduction by a ring.
    Raises TransportError for a dtype that NCCL does not sum.
    """

    def __init__(self, group: DeviceGroup, arrays: Sequence[tuple[str, int]], factor: float) -> None:
        self._group, self._factor = group, factor
        self._arrays: list[tuple[str, int]] = []
        for dtype, count in arrays:
            part, width = as_reals(dtype)
            if part not in REDUCIBLE:
                raise TransportError(
                    f"{group.library} cannot sum {dtype} on {group.where}; it sums {', '.join(REDUCIBLE)}."
                )
            self._arrays.append((part, count * width))
        self.nbytes = sum(STORAGE[dtype].itemsize * count for dtype, count in arrays)
        self.sent_bytes = 2 * (group.size - 1) * self.nbytes // group.size
        self._ready, self._done = group.device.make_event(), group.device.make_event()

    def start(self, sources: Sequence[int], targets: Sequence[int], stream: int) -> None:
        """Enqueue the reduction after the present work of `stream`; the host does not wait.

        sources: addresses, in the order of `arrays`. targets: addresses for the results; a target may be its source.
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
        """Make later work on `stream` wait for the reduction; raises as start() does."""
        self._group.join(stream, self._done)

    def wait(self, pause: Callable[[], object]) -> None:
        """Wait until the reduction is done, calling pause() meanwhile; raises as start() does."""
        self._group.wait(self._done, pause)
