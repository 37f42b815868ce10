"""The planned path: gradients of one optimizer, in buckets that all ranks agreed on, again and again."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hvdkit.engine.observe.bucket_trace import BucketTrace
from hvdkit.engine.observe.recording import PlanFacts
from hvdkit.engine.observe.step_timing import Pace
from hvdkit.engine.planned.agreement import check_agreement
from hvdkit.engine.planned.plan import Bucket, TensorSpec, describe_plan, plan_buckets
from hvdkit.engine.planned.progress import ProgressThread
from hvdkit.engine.planned.watch import Watch
from hvdkit.engine.planned.zero_rounds import ZeroRounds
from hvdkit.engine.request import ReduceOptions
from hvdkit.errors import RankLostError
from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.buckets import CHUNK_BYTES, BucketSpec, InPlaceSegment
from hvdkit.transport.buffer import HALF, STORAGE, Buffer, make_buffer
from hvdkit.transport.coding.api import Matrix
from hvdkit.transport.coding.low_rank import matrix_shape
from hvdkit.transport.polling import Backoff

if TYPE_CHECKING:
    from hvdkit.engine.api import Engine


@dataclass
class Statistics:
    """What a planned reduction has done so far, on this rank.

    reduced_bytes: of buckets. sent_bytes: what this rank gave to the network; 0 where ranks share memory.
    busy_s: from the first bucket's start to the last one's end, summed over generations.
    exposed_s: the part of it in which training stood still.
    """

    generations: int = 0
    reduced_bytes: int = 0
    sent_bytes: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0


class GradientSource(Protocol):
    """Where the tensors of a plan come from and go to; an adapter's."""

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> Filled:
        """Copy a bucket's tensors into `memory` (data_count,); those within the shard `owned` may stay in place.

        Tensors that this rank does not use are filled with zeros, or with the same values on all ranks.
        """

    def drain(self, bucket: int, memory: Buffer, globally_unused: Collection[int]) -> None:
        """Copy a bucket's reduced tensors out of `memory` (data_count,), except those reduced as in-place segments.

        globally_unused: tensors that no rank uses; they are left alone.
        """

    def on_replan(self) -> None:
        """The buckets are going to be others, with other memory. No bucket is under way."""


@dataclass(frozen=True)
class Filled:
    """How a bucket was filled.

    locally_unused: indices of the tensors that this rank does not use. in_place: the segments that were not copied, in
    rising order.
    """

    locally_unused: frozenset[int]
    in_place: Sequence[InPlaceSegment] = ()


class BucketReducer:
    """Reduces one list of tensors over all ranks, bucket by bucket, as they arrive.

    A round begins with the first tensor that arrives and ends with finish(). At most `depth` buckets are under way at a
    time: a rank that is so far ahead of the others waits for them.
    chunk_bytes, algorithm: see BucketSpec. statistics: added to. engine: of the ranks that the transport spans; knows
    the plan by its name, for waits that take long and for ranks that join. Opened by all ranks together; raises
    PlanMismatchError where their tensors differ.
    """

    def __init__(
        self,
        transport: Transport,
        tensors: Sequence[TensorSpec],
        gradients: GradientSource,
        *,
        options: ReduceOptions,
        limit_bytes: int,
        depth: int,
        threaded: bool,
        statistics: Statistics,
        chunk_bytes: int = CHUNK_BYTES,
        algorithm: str = "auto",
        engine: Engine | None = None,
        name: str = "",
    ) -> None:
        wires = [options.wire_for_tensor(tensor) for tensor in tensors]
        how = f"{depth} in flight, chunks of {chunk_bytes}, {algorithm} between hosts, {options}"
        check_agreement(transport, describe_plan(tensors, limit_bytes, how))
        self.buckets: tuple[Bucket, ...] = plan_buckets(tensors, limit_bytes, wires)
        self.statistics = statistics
        self._tensors, self._gradients = tensors, gradients
        self._arithmetic: Arithmetic = transport.arithmetic
        prescale, postscale = options.factors(transport.size, transport.local_ranks)
        self._moving = transport.open_buckets(
            [
                BucketSpec(
                    bucket.dtype,
                    bucket.count,
                    "sum",
                    prescale,
                    postscale,
                    bucket.wire,
                    bucket.count - bucket.data_count,
                    chunk_bytes,
                    algorithm,
                    _matrices(bucket, tensors),
                )
                for bucket in self.buckets
            ],
            depth,
        )
        self._thread = ProgressThread(self._moving) if threaded else None
        if self._thread:  # of an optimizer that is thrown away nobody closes the plan
            weakref.finalize(self, self._thread.end).atexit = False
        self._data, self._owned, self._present = [], [], []
        self._one: list[np.generic] = []  # 1 in the bucket's dtype
        for bucket, memory, owned in zip(self.buckets, self._moving.memory, self._moving.owned, strict=True):
            self._data.append(memory.slice(0, bucket.data_count))
            self._owned.append((min(owned[0], bucket.data_count), min(owned[1], bucket.data_count)))
            self._present.append(memory.slice(bucket.data_count, bucket.count))
            one = make_buffer(1, bucket.dtype)
            if bucket.dtype in HALF:
                self._arithmetic.cast(one, Buffer(np.ones(1, np.float32), "float32"))
            else:
                one.array[:] = 1
            self._one.append(one.array[0])
        self._nbytes = sum(memory.nbytes for memory in self._data)
        # A coding takes all that it sees for numbers; sums of what nobody reads do no harm.
        self._gaps = [() if isinstance(bucket.wire, str) else bucket.gaps for bucket in self.buckets]
        self._of_tensor: list[list[int]] = [[] for _ in tensors]
        for at, bucket in enumerate(self.buckets):
            for tensor in bucket.needs:
                self._of_tensor[tensor].append(at)
        self._trace = BucketTrace(engine.timeline if engine is not None else None, self.buckets, tensors)
        self._lock = threading.RLock()  # gradients of several devices arrive from several threads
        self._check = transport.check
        self._blind: ZeroRounds | None = None
        self._watch: Watch | None = None
        self._rounds, self._name = Counter[str](), name
        if engine is not None:
            engine.joining.plans[name] = self
            self._rounds = engine.joining.rounds
            if engine.watched:
                self._watch = Watch(engine, f"{name} ({_some([tensor.name for tensor in tensors])})")
        facts = PlanFacts(
            name,
            tuple(range(transport.size) if engine is None else engine.ranks),
            tuple(memory.nbytes for memory in self._data),
            tuple(map(_wire_bytes, self.buckets)),
            tuple(_some([tensors[slot.tensor].name for slot in bucket.slots]) for bucket in self.buckets),
            threaded,
        )
        self._pace = Pace(facts, _ignore if engine is None else engine.tell_pace)
        self._begin()

    def _begin(self) -> None:
        self._missing = [len(bucket.needs) for bucket in self.buckets]
        self._next = 0  # bucket to start next
        self._unused: dict[int, frozenset[int]] = {}
        self._under_way: deque[int] = deque()

    def arrived(self, tensor: int) -> None:
        """Say that this rank has the tensor; starts its bucket if that was the last one, and buckets before have."""
        with self._lock:
            for at in self._of_tensor[tensor]:
                self._missing[at] -= 1
            while self._next < len(self.buckets) and not self._missing[self._next]:
                self._start()

    @property
    def under_way(self) -> bool:
        """Has a bucket of this round been started?"""
        return self._next > 0

    def started(self, tensor: int) -> bool:
        """Has any of the tensor been sent in this round?"""
        return self._of_tensor[tensor][0] < self._next

    def _start(self) -> None:
        while len(self._under_way) >= self._moving.depth:
            self._take_oldest()
        at = self._next
        self._next += 1
        if at == 0:
            self._began_s = time.perf_counter()
        self._pace.filling(at)
        with self._trace.filling(at):
            filled = self._gradients.fill(at, self._data[at], self._owned[at])
        for start, stop in self._gaps[at]:
            self._data[at].array[start:stop] = 0
        self._mark(at, filled.locally_unused)
        if filled.locally_unused:
            self._unused[at] = filled.locally_unused
        self._under_way.append(at)
        self._trace.started(at)
        self._pace.ready(at)
        self._moving.start(at, filled.in_place)
        self._wake()
        self._pace.handed(at)
        # What is done is taken at once, while it is in cache.
        while self._under_way and self._moving.finished(self._under_way[0]):
            self._take_oldest()

    def _mark(self, at: int, unused: frozenset[int]) -> None:
        present = self._present[at].array
        present.fill(self._one[at])
        if unused:
            present[[position for position, slot in enumerate(self.buckets[at].slots) if slot.tensor in unused]] = 0

    def _take_oldest(self) -> None:
        at = self._under_way[0]
        self._pace.waiting(at)
        if not self._moving.finished(at):
            self._trace.waiting(at)
            self._wait(at)
        self._pace.reduced(at)
        self._trace.ended(at)
        unused = self._unused.get(at)
        globally_unused: Collection[int] = ()
        if unused:
            slots = zip(self.buckets[at].slots, self._presence(at)[:-1], strict=True)
            globally_unused = frozenset(slot.tensor for slot, there in slots if not there)
        with self._trace.taking(at):
            self._gradients.drain(at, self._data[at], globally_unused)
        self._pace.taken(at)
        self._under_way.popleft()

    def _wait(self, at: int) -> None:
        watch = self._watch
        try:
            if watch is None:
                self._moving.wait(at)
                return
            watch.begin(self._rounds[self._name])
            try:
                self._moving.wait(at, watch.look)
            finally:
                watch.end()
        except RankLostError as error:
            names = _some([self._tensors[slot.tensor].name for slot in self.buckets[at].slots])
            raise RankLostError(f"{error} The gradients of {names} were being reduced.") from None

    def _presence(self, at: int) -> list[float]:
        numbers = Buffer(np.empty(self._present[at].count, np.float32), "float32")
        self._arithmetic.cast(numbers, self._present[at])
        found: list[float] = numbers.array.tolist()
        return found

    def zero_rounds(self) -> ZeroRounds:
        """The rounds of a rank that has joined, while no other is under way here; begun by the first call."""
        if self._blind is None:
            self._blind = ZeroRounds(
                self._moving,
                len(self.buckets),
                zero=self._clear,
                anyone_trains=lambda at: self._presence(at)[-1] > 0,
                started=self._wake,
                rounds=self._count_round,
            )
        return self._blind

    def end_zero_rounds(self) -> None:
        """They are over."""
        self._blind = None

    def drain_and_close(self) -> None:
        """Close the plan while ranks that have joined are in zero rounds of it; collective."""
        rounds, waiting = self.zero_rounds(), Backoff(self._check)
        while not rounds.over:
            if not rounds.advance():
                waiting.pause()
        self.end_zero_rounds()
        self.close()

    def _clear(self, at: int) -> None:
        self._moving.memory[at].array[:] = 0

    def _wake(self) -> None:
        if self._thread:
            self._thread.wake()

    def _count_round(self) -> None:
        self._rounds[self._name] += 1

    def finish(self) -> None:
        """Start what has not started yet, and take all results; then the next round begins.

        Raises RankLostError, with the tensors concerned, if a rank has ended.
        """
        began = time.perf_counter()
        with self._lock:
            self._pace.finishing()
            while self._next < len(self.buckets):
                self._start()
            while self._under_way:
                self._take_oldest()
            self._pace.ended(self._rounds[self._name])
            self._begin()
            self._count_round()
        ended = time.perf_counter()
        self.statistics.generations += 1
        self.statistics.reduced_bytes += self._nbytes
        self.statistics.sent_bytes += self._moving.sent_bytes
        self.statistics.busy_s += ended - self._began_s
        self.statistics.exposed_s += ended - began

    def close(self) -> None:
        """Free the buckets; collective."""
        if self._thread:
            self._thread.close()
        self._moving.close()
        self._data, self._present = [], []  # views of the memory, which stays mapped as long as one of them is left


def _matrices(bucket: Bucket, tensors: Sequence[TensorSpec]) -> tuple[Matrix, ...]:
    """The bucket's tensors as its coding sees them; none for a coding of numbers."""
    if isinstance(bucket.wire, str) or not bucket.wire.of_matrices:
        return ()
    return tuple(Matrix(slot.start, *matrix_shape(tensors[slot.tensor].shape)) for slot in bucket.slots)


def _wire_bytes(bucket: Bucket) -> int:
    """What of a bucket goes between hosts, where that is no coding's secret."""
    dtype = bucket.wire if isinstance(bucket.wire, str) and bucket.wire != "none" else bucket.dtype
    return bucket.data_count * STORAGE[dtype].itemsize


def _ignore(_: object) -> None:
    pass


def _some(names: Sequence[str]) -> str:
    """The first three names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
