"""The planned path: the gradients of one optimizer, in buckets that all ranks agreed on once, reduced in each step."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdkit.engine.named.api import Engine
from hvdkit.engine.observe.observer import DRAINED, FILL, FILLED, REDUCED, STARTED, WAIT, PlanObserver
from hvdkit.engine.observe.recording import PlanFacts
from hvdkit.engine.observe.timeline import Timeline
from hvdkit.engine.planned.agreement import check_tensors
from hvdkit.engine.planned.on_device import OnDevice
from hvdkit.engine.planned.plan import Bucket, Plan, TensorSpec, plan_buckets
from hvdkit.engine.planned.progress import ProgressThread, WaitReporter
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.engine.planned.source import TensorSource
from hvdkit.engine.planned.used_masks import JoinRounds, Masks, UsedMasks
from hvdkit.engine.request import ReduceOptions
from hvdkit.errors import RankLostError
from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import Buckets, BucketSpec, InPlaceSegment
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.polling import Backoff


@dataclass
class Statistics:
    """Totals of a planned reduction so far, on this rank.

    generations: number of rounds.
    reduced_bytes: bytes of the buckets that were reduced.
    sent_bytes: bytes that this rank sent over the network; 0 if ranks share memory.
    busy_s: time from the first bucket's start to the last bucket's end, summed over rounds.
    exposed_s: the part of busy_s in which training waited. For buckets on a GPU, busy_s and exposed_s are the GPU's
        times, and are added in a later round, when the GPU has reached them.
    waited_s: time in which training waited for other ranks or the network, also during backward; None if a GPU's stream
        waits instead of this process.
    """

    generations: int = 0
    reduced_bytes: int = 0
    sent_bytes: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    waited_s: float | None = 0.0

    def add_seconds(self, busy_s: float, exposed_s: float) -> None:
        """Add the times of a round."""
        self.busy_s += busy_s
        self.exposed_s += exposed_s


@dataclass(frozen=True)
class Context:
    """The environment of a plan: everything that depends neither on its tensors nor on its settings.

    transport: of the ranks that train together.
    name: of the plan, the same on all ranks.
    engine: of the same ranks, for join(), the stall report and stragglers; None for none of these.
    timeline: of this process.
    spare_core: Has this rank a core for a progress thread?
    open_buckets: opens buckets outside the transport's memory, for example on a device; None for the transport's.
    open_masks: makes the masks of such buckets.
    device: the device with the buckets; None for the host.
    scatters: reduce-scatter: each rank gets only its shard of a bucket, see Buckets.reduce_scatter().
    """

    transport: Transport
    name: str = ""
    engine: Engine | None = None
    timeline: Timeline | None = None
    spare_core: bool = False
    open_buckets: Callable[[Sequence[BucketSpec], int | None], Buckets] | None = None
    open_masks: Callable[[Sequence[Bucket], Sequence[Buffer]], Masks] | None = None
    device: OnDevice | None = None
    scatters: bool = False


class BucketReducer:
    """Reduces one list of tensors over all ranks, bucket by bucket, as the tensors arrive.

    A round begins with the first tensor that arrives and ends with finish(). Opened, and closed, by all ranks together.

    context: the environment of the plan.
    tensors: the list, the same on all ranks.
    source: copies the tensors into buckets and back.
    options: of the reduction.
    settings: of the plan.
    statistics: added to.
    Raises PlanMismatchError if the ranks' tensors differ.

    Buckets start in index order, whatever the order of arrival, because the transport posts a bucket's collectives when
    it starts, and these must be posted in one order on all ranks. They are drained in the same order. At most `depth`
    buckets are started and not drained: buckets i and i + depth share memory, so this rank fills the second only after
    it has drained the first; and no other rank reads a bucket's memory any more when the transport reports it reduced.
    A rank that is `depth` buckets ahead of the others therefore waits for them.

    Lock order: the reducer's, the engine's, the buckets'. Gradients of several devices arrive from several threads, so
    the reducer's lock is held from an arrival to the end of the work that it starts (fill, start, drain, and waits, in
    which the engine's locks are taken for the stall report). The progress thread takes only the buckets' lock. Zero
    rounds, replan() and close() do not take the reducer's lock: this rank has no round of its own then.
    """

    def __init__(
        self,
        context: Context,
        tensors: Sequence[TensorSpec],
        source: TensorSource,
        *,
        options: ReduceOptions,
        settings: PlanSettings,
        statistics: Statistics,
    ) -> None:
        self.statistics = statistics
        #: Called at the end of each round, on all ranks after the same round; may call replan().
        self.on_round_end: Callable[[], None] | None = None
        #: Called on a joined rank at the end of each round of the other ranks.
        self.on_zero_round: Callable[[], None] | None = None
        self.context, self._tensors, self._source, self._options = context, tuple(tensors), source, options
        self._lock = threading.RLock()
        self._join_rounds: JoinRounds | None = None
        self._watch: WaitReporter | None = None
        self._rounds = Counter[str]()
        self._streams = None if context.device is None else context.device.streams
        self._open(settings)
        engine = context.engine
        if engine is not None:
            engine.joining.plans[context.name] = self
            self._rounds = engine.joining.rounds
            if engine.notice_s is not None:
                self._watch = WaitReporter(engine, engine.notice_s, f"{context.name} ({self.plan.name()})")

    def _open(self, settings: PlanSettings) -> None:
        context, options, transport = self.context, self._options, self.context.transport
        depth, chunk_bytes, algorithm = settings.buckets_in_flight, settings.chunk_bytes, settings.algorithm
        how = f"{depth} in flight, chunks of {chunk_bytes}, {algorithm} between hosts, {options}"
        how += "" if context.device is None else f", device_sums={context.device.sums}"
        check_tensors(transport, self._tensors, how, settings.fusion_bytes)
        wires = [options.wire_for_tensor(tensor) for tensor in self._tensors]
        self.plan = plan = Plan(self._tensors, plan_buckets(self._tensors, settings.fusion_bytes, wires))
        self._source.on_plan(plan)
        factors = options.factors(transport.size, transport.local_ranks)
        open_buckets = context.open_buckets or transport.open_buckets
        self._buckets = buckets = open_buckets(plan.specs(factors, chunk_bytes, algorithm), depth)
        self._thread = ProgressThread(buckets, self) if settings.threaded(context.spare_core) else None
        self._masks: Masks
        if context.open_masks is None:
            self._masks = UsedMasks(plan.buckets, buckets.memory, transport.arithmetic)
        else:
            self._masks = context.open_masks(plan.buckets, buckets.memory)
        counts = [bucket.data_count for bucket in plan.buckets]
        self._data = [memory.slice(0, count) for memory, count in zip(buckets.memory, counts, strict=True)]
        self._owned = [
            (min(start, count), min(stop, count)) for (start, stop), count in zip(buckets.owned, counts, strict=True)
        ]
        # A coding reads padding as numbers, so it must be zero; without a coding no rank reads the sums of padding.
        self._padding = [() if isinstance(bucket.wire, str) else bucket.gaps for bucket in plan.buckets]
        self._buckets_needing = plan.buckets_needing()
        self._nbytes = sum(bucket.nbytes for bucket in plan.buckets)
        #: For each bucket the number of tensors that it needs; at the end a sentinel for a bucket that never starts.
        self._needs = [*(len(bucket.needs) for bucket in plan.buckets), -1]
        self._observer = self._observe(plan)
        self._begin_round()

    def _observe(self, plan: Plan) -> PlanObserver:
        context, engine, indices = self.context, self.context.engine, range(len(plan.buckets))
        facts = PlanFacts(
            context.name,
            tuple(range(context.transport.size) if engine is None else engine.ranks),
            tuple(bucket.nbytes for bucket in plan.buckets),
            tuple(bucket.wire_bytes for bucket in plan.buckets),
            tuple(map(plan.name, indices)),
            self._thread is not None,
        )
        report = None if engine is None else engine.report_window
        clock = None if context.device is None else context.device.clock
        names = [plan.names_of_slots(index) for index in indices]
        return PlanObserver(facts, names, context.timeline, report, clock, self.statistics.add_seconds)

    def _begin_round(self) -> None:
        self._missing = self._needs.copy()  # tensors that have not arrived
        self._next = 0  # bucket to start next
        self._started: deque[int] = deque()  # and not drained
        self._waited_s = 0.0
        if self._streams is not None:
            self._streams.clear()

    @property
    def depth(self) -> int:
        """The maximum number of buckets that are started and not drained."""
        return self._buckets.depth

    @property
    def under_way(self) -> bool:
        """Has a bucket of this round been started?"""
        return self._next > 0

    @property
    def next_wait(self) -> str:
        """The name of the operation that reports a wait in the next round; "" if waits are not reported."""
        return "" if self._watch is None else self._watch.name(self._rounds[self.context.name])

    def started(self, tensor: int) -> bool:
        """Return whether the tensor, or a slice of it, has been sent in this round."""
        return self._buckets_needing[tensor][0] < self._next

    def check(self) -> None:
        """Raise the device's error, if it has failed."""
        if self.context.device is not None:
            self.context.device.check()

    def forget_arrivals(self) -> None:
        """Restart the round; the caller ensures that none of its buckets is started."""
        with self._lock:
            self._begin_round()

    def arrived(self, tensor: int) -> None:
        """Take note that a tensor is complete. Starts buckets whose tensors are complete, after all earlier buckets."""
        with self._lock:
            if self._streams is not None:
                self._streams.note()
            missing = self._missing
            for bucket in self._buckets_needing[tensor]:
                missing[bucket] -= 1
            while not missing[self._next]:
                self._start_next()

    def _start_next(self) -> None:
        while len(self._started) >= self._buckets.depth:
            self._drain_oldest()
        bucket = self._next
        self._next += 1
        if bucket == 0:
            self._began_s = time.perf_counter()
        event = self._observer.event
        event(FILL, bucket)
        if self._streams is not None:
            self._streams.join()
        data = self._data[bucket]
        filled = self._source.fill(bucket, data, self._owned[bucket])
        for start, stop in self._padding[bucket]:
            data.array[start:stop] = 0
        self._masks.mark(bucket, filled.locally_unused)
        event(FILLED, bucket)
        self._started.append(bucket)
        self._reduce(bucket, filled.in_place)
        event(STARTED, bucket)
        while self._started and self._buckets.finished(self._started[0]):  # while the result is in cache
            self._drain_oldest()

    def _drain_oldest(self) -> None:
        bucket = self._started[0]
        event = self._observer.event
        if not self._buckets.finished(bucket):
            event(WAIT, bucket)
            began = time.perf_counter()
            self._wait(bucket)
            self._waited_s += time.perf_counter() - began
        event(REDUCED, bucket)
        self._source.drain(bucket, self._data[bucket], self._masks.globally_unused(bucket))
        event(DRAINED, bucket)
        self._started.popleft()

    def _wait(self, bucket: int) -> None:
        watch = self._watch
        try:
            if watch is None:
                self._buckets.wait(bucket)
                return
            watch.begin(self._rounds[self.context.name])
            try:
                self._buckets.wait(bucket, watch.check)
            except RankLostError:
                watch.raise_disagreement()
                raise
            finally:
                watch.end()
        except RankLostError as error:
            raise RankLostError(f"{error} The gradients of {self.plan.name(bucket)} were being reduced.") from None

    def finish(self) -> None:
        """Start all remaining buckets, and drain all buckets; then the next round begins.

        Raises RankLostError, with the tensors concerned, if a rank has ended.
        """
        began, statistics = time.perf_counter(), self.statistics
        with self._lock:
            self._observer.finishing()
            while self._next < len(self.plan.buckets):
                self._start_next()
            while self._started:
                self._drain_oldest()
            self._observer.round_ended(self._rounds[self.context.name], self._waited_s)
            on_device = self.context.device is not None
            statistics.waited_s = None if on_device else (statistics.waited_s or 0.0) + self._waited_s
            self._begin_round()
            self._count_round()
        ended = time.perf_counter()
        statistics.generations += 1
        statistics.reduced_bytes += self._nbytes
        statistics.sent_bytes += self._buckets.sent_bytes // (2 if self.context.scatters else 1)
        if not on_device:
            statistics.add_seconds(ended - self._began_s, ended - began)
        if self.on_round_end is not None:
            self.on_round_end()

    def _reduce(self, bucket: int, in_place: Sequence[InPlaceSegment] = ()) -> None:
        if self.context.scatters:
            self._buckets.reduce_scatter(bucket, in_place)
        else:
            self._buckets.start(bucket, in_place)
        if self._thread is not None:
            self._thread.wake()

    def _count_round(self) -> None:
        self._rounds[self.context.name] += 1

    def replan(self, settings: PlanSettings) -> None:
        """Divide the same tensors into other buckets; collective, between rounds, while no rank has joined."""
        thread, buckets = self._thread, self._buckets
        self._open(settings)
        _close(thread, buckets)

    def join_rounds(self) -> JoinRounds:
        """Return the zero rounds of a joined rank, begun by the first call; it has no round of its own meanwhile."""
        if self._join_rounds is None:
            self._join_rounds = JoinRounds(self._buckets, self._masks, self._reduce, self._end_zero_round)
        return self._join_rounds

    def _end_zero_round(self) -> None:
        self._count_round()
        if self.on_zero_round is not None:
            self.on_zero_round()

    def end_zero_rounds(self) -> None:
        """End the zero rounds, after all ranks have joined or closed the plan."""
        self._join_rounds = None

    def drain_and_close(self) -> None:
        """Close the plan while joined ranks are in its zero rounds; collective."""
        rounds, waiting = self.join_rounds(), Backoff(self.context.transport.check)
        while not rounds.over:
            if not rounds.advance():
                waiting.pause()
        self.end_zero_rounds()
        self.close()

    def close(self) -> None:
        """Free the buckets; collective."""
        self.on_round_end = None
        _close(self._thread, self._buckets)
        # Drop all views of the memory, because it stays mapped as long as a view exists.
        self._data, self._masks = [], UsedMasks((), (), self.context.transport.arithmetic)


def _close(thread: ProgressThread | None, buckets: Buckets) -> None:
    if thread is not None:
        thread.close()
    buckets.close()
