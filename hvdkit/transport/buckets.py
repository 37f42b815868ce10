"""Defines the buckets of a plan, and the base class of buckets whose operations progress in steps."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdkit.transport.arithmetic import check_reduction
from hvdkit.transport.buffer import STORAGE, Buffer, Narrow, Op
from hvdkit.transport.coding.api import Coding, Matrix
from hvdkit.transport.polling import Backoff, calls

#: A chunk of this size stays in a core's own cache between the sum and the copies of the sum.
CHUNK_BYTES = 512 * 1024


@dataclass(frozen=True)
class BucketSpec:
    """One bucket of an agreed plan, the same on all ranks.

    dtype: the elements' dtype.
    count: number of elements.
    op: the reduction.
    prescale: factor on each host's sum, before the wire.
    postscale: factor on the result.
    wire: dtype between hosts, "none" for the bucket's own; or a coding.
    exact: number of elements, at the end of the bucket, that a coding sends unchanged.
    chunk_bytes: bytes that a rank sums and hands out at a time if ranks share memory.
    algorithm: algorithm between hosts, see BetweenHosts; "auto" for the transport's.
    matrices: the tensors before the exact elements, in rising order, if the coding is one of matrices.
    Raises TypeError as check_reduction() does.
    """

    dtype: str
    count: int
    op: Op = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    wire: Narrow | Coding = "none"
    exact: int = 0
    chunk_bytes: int = CHUNK_BYTES
    algorithm: str = "auto"
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        check_reduction(self.dtype, self.op, "a bucket")

    @property
    def narrow(self) -> Narrow:
        """Return the wire dtype of the uncoded elements; "none" for the bucket's own."""
        return self.wire if isinstance(self.wire, str) else "none"

    @property
    def wire_dtype(self) -> str:
        """Return the wire dtype of the uncoded elements; the bucket's own unless another was requested."""
        return self.dtype if self.narrow == "none" else self.narrow


def see_as(memory: NDArray[np.uint8], spec: BucketSpec) -> Buffer:
    """Return the beginning of `memory` as the numbers of a bucket, sharing memory."""
    storage = STORAGE[spec.dtype]
    return Buffer(memory[: spec.count * storage.itemsize].view(storage), spec.dtype)


@dataclass(frozen=True, slots=True)
class InPlaceSegment:
    """A range of a bucket's elements whose values are reduced outside of the bucket's memory.

    first: index of the first element in the bucket. source: the values. target: memory for the result: `source` itself,
    or a buffer of the same size that does not overlap it. The caller must not use either until the bucket is reduced.
    """

    first: int
    source: Buffer
    target: Buffer


class Phases(NamedTuple):
    """The phases of an operation on a bucket: sum it into shards, give all shards to all ranks, or both."""

    reduce_scatter: bool
    all_gather: bool


ALLREDUCE = Phases(reduce_scatter=True, all_gather=True)
REDUCE_SCATTER = Phases(reduce_scatter=True, all_gather=False)
ALL_GATHER = Phases(reduce_scatter=False, all_gather=True)


class Buckets(ABC):
    """The buckets of one plan, in memory that the transport chooses; each round reduces them in place.

    A round of bucket i: the user fills memory[i] and calls start(i). The user must not touch memory[i] until
    finished(i) or wait(i); then it holds the result, and belongs to the user. All ranks begin the operations in the
    same order, a plan's buckets by their index. Buckets i and i + depth share memory, so at most `depth` buckets are in
    use at a time.

    The two phases of start(i) are also operations of their own, which end with finished(i) or wait(i):
    reduce_scatter(i) sums every rank's memory[i] into shards; all_gather(i) gives every rank all shards. Values that
    the user writes to the rank's shard in between reach all ranks. Each phase may be called without the other, and
    plans may mix them with start().
    The results of both phases in sequence equal those of start(i) to the bit, with two exceptions between hosts: an
    allreduce that adds in another order than that of the ranks (algorithms "halving", "library", and "doubling" on more
    than two hosts), and one that rounds the sum to a narrower wire dtype, because all_gather(i) moves numbers
    unchanged. A coding sends as much for reduce_scatter(i) as for start(i).

    depth: how many buckets may be in use at a time.
    sent_bytes: bytes that this rank sends over the network when all buckets are reduced once.
    memory: the memory of each bucket.
    owned: for each bucket the elements, as (start, stop), that no other rank reads in this rank's memory[i]. They need
    not be filled if start() gets an in-place segment for them. May be empty.
    shard: for each bucket the elements, as (start, stop), whose sum this rank holds after reduce_scatter(i); the other
    elements are undefined then. The shards of all ranks cover the bucket once; some are empty if a bucket is short, or
    if a host has more ranks than another host. On one host shard equals owned.
    """

    depth: int
    sent_bytes: int
    memory: Sequence[Buffer]
    owned: Sequence[tuple[int, int]]
    shard: Sequence[tuple[int, int]]

    @abstractmethod
    def begin(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> None:
        """Begin an operation for start(), reduce_scatter() and all_gather(), each with its phases."""

    def start(self, index: int, in_place: Sequence[InPlaceSegment] = ()) -> None:
        """Reduce the bucket as soon as all ranks have started it.

        in_place: segments that replace the values in memory; in rising order, within owned[index].
        """
        self.begin(index, in_place, ALLREDUCE)

    def reduce_scatter(self, index: int, in_place: Sequence[InPlaceSegment] = ()) -> None:
        """Reduce this rank's shard of the bucket as soon as all ranks have called it.

        in_place: as start()'s; only on one host, where Transport.between is None.
        """
        self.begin(index, in_place, REDUCE_SCATTER)

    def all_gather(self, index: int, in_place: Sequence[InPlaceSegment] = ()) -> None:
        """Give this rank's shard of the bucket to all ranks as soon as they have called it.

        in_place: as in reduce_scatter(); the targets hold the values to give.
        """
        self.begin(index, in_place, ALL_GATHER)

    @abstractmethod
    def advance(self) -> bool:
        """Make the progress that is possible without blocking; return True if anything progressed."""

    @abstractmethod
    def finished(self, index: int) -> bool:
        """Return whether the operation on the bucket is done, without making progress."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Return whether an operation was begun and is not yet done."""

    @abstractmethod
    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """Wait until the operation on the bucket is done. Raises RankLostError if a rank that it needs has ended.

        watch: called now and then during a long wait; may raise.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the memory; a collective call."""


def cover(memory: Buffer, owned: tuple[int, int], in_place: Sequence[InPlaceSegment]) -> list[InPlaceSegment]:
    """Cover the owned shard: the segments of `in_place`, and segments of `memory` for the elements between them."""
    segments: list[InPlaceSegment] = []
    at = owned[0]
    for segment in (*in_place, InPlaceSegment(owned[1], empty := memory.slice(owned[1], owned[1]), empty)):
        if at < segment.first:
            between = memory.slice(at, segment.first)
            segments.append(InPlaceSegment(at, between, between))
        if segment.source.count:
            segments.append(segment)
        at = segment.first + segment.source.count
    return segments


def plan_memory(specs: Sequence[BucketSpec], depth: int | None) -> list[int]:
    """Return the bytes of each memory block: `depth` blocks, which the buckets use in turn; None: one a bucket."""
    sizes = [spec.count * STORAGE[spec.dtype].itemsize for spec in specs]
    pieces = min(depth or len(specs), len(specs))
    return [max(sizes[turn::pieces]) for turn in range(pieces)]


def under_way(index: int) -> RuntimeError:
    """Make the error of a bucket whose operation is begun again before it is done."""
    return RuntimeError(f"bucket {index} is still being reduced or gathered; call wait({index}) first")


class SteppedBuckets(Buckets):
    """Buckets whose operations progress in steps; any thread may call advance(), which steps all of them.

    check: called now and then in waits; raises RankLostError if a peer has ended.
    """

    sent_bytes = 0

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._running: dict[int, Iterator[bool]] = {}  # in the order of their beginning
        self._lock = threading.RLock()
        self._failure: BaseException | None = None

    @abstractmethod
    def steps(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> Iterator[bool]:
        """Do the operation that begin() begins, in steps; a step ends when the operation would have to wait.

        A step yields False while later operations must not overtake this one, because all ranks post collectives in
        the same order, and True once they may.
        """

    def begin(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> None:
        if index in self._running:
            raise under_way(index)
        calls().begun += 1
        steps = self.steps(index, in_place, phases)
        with self._lock:
            self._running[index] = steps
            self.advance()

    def advance(self) -> bool:
        """See Buckets.advance. Raises the error of an operation that has failed."""
        moved = False
        with self._lock:
            if self._failure is not None:
                raise self._failure
            for index, steps in list(self._running.items()):
                try:
                    overtaking = next(steps)
                except StopIteration:
                    del self._running[index]
                    moved = True
                    continue
                except BaseException as error:
                    calls().uncertain = True
                    self._failure = error  # every later call raises it, also in other threads
                    raise
                if not overtaking:
                    break
        return moved

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def finished(self, index: int) -> bool:
        return index not in self._running

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        def check() -> None:
            self._check()
            if watch is not None:
                watch()

        waiting = Backoff(check)
        while index in self._running:
            if not self.advance():
                waiting.pause()

    def close(self) -> None:
        self._running.clear()
