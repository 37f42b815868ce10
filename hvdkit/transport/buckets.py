"""Buckets of a plan: what they are, and the base class of those whose reduction is a sequence of steps."""

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

#: Stays in a core's own cache between the sum and the copies of it.
CHUNK_BYTES = 512 * 1024


@dataclass(frozen=True)
class BucketSpec:
    """One bucket of an agreed plan, the same on all ranks.

    count: elements. prescale: factor on each node's sum, before the wire. postscale: factor on the result.
    wire: dtype between hosts, "none" for the bucket's own; or a coding, which leaves the last `exact` elements as they
    are. matrices: the tensors before those, in rising order, where the coding is one of matrices.
    chunk_bytes: that a rank sums and hands out at a time, where ranks share memory. algorithm: between hosts, see
    BetweenHosts; that of the transport if it is "auto". Raises TypeError as check_reduction does.
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
        """The dtype between hosts of what is not coded."""
        return self.wire if isinstance(self.wire, str) else "none"

    @property
    def wire_dtype(self) -> str:
        """The dtype between hosts of what is not coded; the bucket's own if no other was asked for."""
        return self.dtype if self.narrow == "none" else self.narrow


def see_as(memory: NDArray[np.uint8], spec: BucketSpec) -> Buffer:
    """The beginning of `memory` as the numbers of a bucket."""
    storage = STORAGE[spec.dtype]
    return Buffer(memory[: spec.count * storage.itemsize].view(storage), spec.dtype)


@dataclass(frozen=True, slots=True)
class InPlaceSegment:
    """A range of a bucket's elements whose values are reduced outside of the bucket's memory.

    first: element of the bucket. source: the values. target: memory for the result: `source` itself, or a buffer of the
    same size that does not overlap it. The caller leaves both alone until the bucket is reduced.
    """

    first: int
    source: Buffer
    target: Buffer


class Phases(NamedTuple):
    """What an operation on a bucket does: sum it into shards, hand all shards out to all ranks, or both."""

    reduce_scatter: bool
    all_gather: bool


ALLREDUCE = Phases(reduce_scatter=True, all_gather=True)
REDUCE_SCATTER = Phases(reduce_scatter=True, all_gather=False)
ALL_GATHER = Phases(reduce_scatter=False, all_gather=True)


class Buckets(ABC):
    """The buckets of one plan in memory of the transport's choice, reduced in place, again and again.

    A round of bucket i: the user fills memory[i]; start(i); memory[i] is left alone until finished(i) or wait(i); then
    it holds the result, and is the user's. All ranks begin the operations in one order, a plan's buckets by their
    index. Buckets i and i + depth share memory, so no more than `depth` of them are in use at a time.

    The two phases of start(i), each an operation of its own that ends with finished(i) or wait(i): reduce_scatter(i)
    sums every rank's memory[i] into shards; all_gather(i) gives every rank all shards. What the user writes to the
    rank's shard in between reaches all ranks. The one may be called without the other, and start() beside them.
    The results of both phases in sequence are those of start(i), to the bit, except between hosts where the allreduce
    adds in another order than that of the ranks (algorithms "halving", "library", and "doubling" on more than two
    hosts), or rounds the sum to a narrower wire dtype: all_gather(i) moves numbers as they are. A coding sends as much
    for reduce_scatter(i) as for start(i).

    owned: of each bucket the elements, as (start, stop), that no other rank reads in this rank's memory[i]: they need
    not be filled where start() gets an in-place segment for them. May be empty.
    shard: of each bucket the elements, as (start, stop), that this rank holds the sum of after reduce_scatter(i); the
    other elements are undefined then. The shards of all ranks cover the bucket once; some are empty where a bucket is
    short, or a host has more ranks than another one. Equal to owned on one host.
    sent_bytes: how many bytes this rank gives to the network when all buckets are reduced once.
    """

    depth: int
    sent_bytes: int
    memory: Sequence[Buffer]
    owned: Sequence[tuple[int, int]]
    shard: Sequence[tuple[int, int]]

    @abstractmethod
    def begin(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> None:
        """What start(), reduce_scatter() and all_gather() do, each with its phases."""

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

        in_place: as reduce_scatter()'s; their targets hold what is given.
        """
        self.begin(index, in_place, ALL_GATHER)

    @abstractmethod
    def advance(self) -> bool:
        """Do what can be done without waiting; True if anything moved. Never blocks."""

    @abstractmethod
    def finished(self, index: int) -> bool:
        """Is the operation on the bucket done? Only asks."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Is any operation begun and not yet done?"""

    @abstractmethod
    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """Return when the operation on the bucket is done. Raises RankLostError if a rank it waits for has ended.

        watch: called now and then meanwhile, where that takes long; may raise.
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
    """The bytes of each piece of memory that the buckets take in turn: `depth` pieces, or one a bucket if None."""
    sizes = [spec.count * STORAGE[spec.dtype].itemsize for spec in specs]
    pieces = min(depth or len(specs), len(specs))
    return [max(sizes[turn::pieces]) for turn in range(pieces)]


def under_way(index: int) -> RuntimeError:
    """The error of a bucket that is begun again before it is done."""
    return RuntimeError(f"bucket {index} is still being reduced or gathered; call wait({index}) first")


class SteppedBuckets(Buckets):
    """Buckets whose operations go on in steps; whoever has time drives them all, from any thread.

    check: called now and then while waiting; raises RankLostError if a peer has ended.
    """

    sent_bytes = 0

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._running: dict[int, Iterator[bool]] = {}  # in the order of their beginning
        self._lock = threading.RLock()
        self._failure: BaseException | None = None

    @abstractmethod
    def steps(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> Iterator[bool]:
        """What begin() begins, in steps, each of which ends where the operation would have to wait.

        A step yields False while later operations must not overtake it, as all ranks post collectives in one order, and
        True once they may.
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
        """See Buckets.advance. Raises what an operation has failed with."""
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
                    self._failure = error  # met by another thread, say: every later call tells of it
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
