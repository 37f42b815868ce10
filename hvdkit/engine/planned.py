"""The planned path: gradients of one optimizer, in buckets that all ranks agreed on, again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdkit.engine.agreement import check_agreement
from hvdkit.engine.buckets import Bucket, TensorSpec, describe_plan, plan_buckets
from hvdkit.engine.progress import ProgressThread
from hvdkit.engine.request import ReduceOptions
from hvdkit.errors import RankLostError
from hvdkit.transport.base import Arithmetic, BucketSpec, Buffer, Transport


@dataclass
class Statistics:
    """What a planned reduction has done so far, on this rank.

    reduced_bytes: of buckets. busy_s: from the first bucket's start to the last one's end, summed over generations.
    exposed_s: the part of it in which training stood still.
    """

    generations: int = 0
    reduced_bytes: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0


@dataclass
class _Generation:
    """One round of all buckets. missing: per bucket, tensors that have not arrived. next: bucket to start next."""

    missing: list[int]
    next: int = 0
    started_s: float = 0.0
    absent: dict[int, frozenset[int]] = field(default_factory=dict)  # bucket -> tensors that this rank does not have


class PlannedReduction:
    """Reduces one list of tensors over all ranks, bucket by bucket, as they arrive.

    fill: called with a bucket's index just before it starts; puts its tensors into `memory(bucket)` and returns the
    indices of those that this rank does not have (their memory must hold zeros, or what all ranks have in common).
    statistics: added to.
    Opened by all ranks together; raises PlanMismatchError where their tensors differ.
    """

    def __init__(
        self,
        transport: Transport,
        tensors: Sequence[TensorSpec],
        *,
        fill: Callable[[int], Sequence[int]],
        options: ReduceOptions,
        limit_bytes: int,
        threaded: bool,
        statistics: Statistics,
    ) -> None:
        check_agreement(transport, describe_plan(tensors, limit_bytes, str(options)))
        self.buckets: tuple[Bucket, ...] = plan_buckets(tensors, limit_bytes)
        self.statistics = statistics
        self._tensors = tensors
        self._arithmetic: Arithmetic = transport.arithmetic
        self._fill = fill
        prescale, postscale = options.factors(transport.size, transport.local_ranks)
        self._moving = transport.open_buckets(
            [
                BucketSpec(bucket.dtype, bucket.count, "sum", prescale, postscale, options.wire_for(bucket.dtype))
                for bucket in self.buckets
            ]
        )
        self._thread = ProgressThread(self._moving) if threaded else None
        self._bucket_of = {slot.tensor: at for at, bucket in enumerate(self.buckets) for slot in bucket.slots}
        self._lock = threading.RLock()  # gradients of several devices arrive from several threads
        self._sizes = [len(bucket.slots) for bucket in self.buckets]
        self._data = [
            (memory.slice(0, bucket.data_count), result.slice(0, bucket.data_count))
            for bucket, memory, result in zip(self.buckets, self._moving.memory, self._moving.result, strict=True)
        ]
        self._present = [
            memory.slice(bucket.data_count, bucket.count)
            for bucket, memory in zip(self.buckets, self._moving.memory, strict=True)
        ]
        self._shown_absent: list[frozenset[int]] = [frozenset()] * len(self.buckets)
        for present in self._present:
            self._mark(present, 1.0)
        self._now = _Generation(list(self._sizes))

    def memory(self, bucket: int) -> Buffer:
        """Where a bucket's tensors are put before, and found after, it is reduced: (data_count,)."""
        return self._data[bucket][0]

    def arrived(self, tensor: int) -> None:
        """Say that this rank has the tensor; starts its bucket if that was the last one, and buckets before have."""
        with self._lock:
            now = self._now
            at = self._bucket_of[tensor]
            now.missing[at] -= 1
            if not now.missing[at] and at == now.next:
                while now.next < len(self.buckets) and not now.missing[now.next]:
                    self._start()

    @property
    def under_way(self) -> bool:
        """Has a bucket of this generation been started?"""
        return self._now.next > 0

    def started(self, tensor: int) -> bool:
        """Has the tensor's bucket been started in this generation? Then its memory is not to be touched."""
        return self._bucket_of[tensor] < self._now.next

    def forget(self) -> None:
        """Drop what has arrived; only while nothing is under way."""
        self._now = _Generation(list(self._sizes))

    def _start(self) -> None:
        now = self._now
        at = now.next
        now.next += 1
        if at == 0:
            now.started_s = time.perf_counter()
        absent = frozenset(self._fill(at))
        if absent or self._shown_absent[at]:
            for slot, tensor in enumerate(self.buckets[at].slots):
                self._mark(self._present[at].slice(slot, slot + 1), 0.0 if tensor.tensor in absent else 1.0)
            self._shown_absent[at] = absent
        if absent:
            now.absent[at] = absent
        self._moving.start(at)
        if self._thread:
            self._thread.wake()

    def _mark(self, present: Buffer, value: float) -> None:
        self._arithmetic.cast(present, Buffer(np.full(present.count, value, np.float32), "float32"))

    def finish(self) -> set[int]:
        """Start what has not started yet, wait for all buckets, and put the results into the tensors' memory.

        Returns the tensors that this rank did not have and another one did. What no rank had is left untouched.
        Raises RankLostError, with the tensors concerned, if a rank has ended.
        """
        began = time.perf_counter()
        while self._now.next < len(self.buckets):
            self._start()
        now, self._now = self._now, _Generation(list(self._sizes))
        gained: set[int] = set()
        for at, bucket in enumerate(self.buckets):
            try:
                self._moving.wait(at)
            except RankLostError as error:
                names = ", ".join(self._tensors[slot.tensor].name for slot in bucket.slots[:3])
                more = f" and {len(bucket.slots) - 3} more" if len(bucket.slots) > 3 else ""
                raise RankLostError(f"{error} The gradients of {names}{more} were being reduced.") from None
            gained |= self._collect(at, bucket, now.absent.get(at, frozenset()))
        ended = time.perf_counter()
        self.statistics.generations += 1
        self.statistics.reduced_bytes += sum(memory.nbytes for memory, _ in self._data)
        self.statistics.busy_s += ended - now.started_s
        self.statistics.exposed_s += ended - began
        return gained

    def _collect(self, at: int, bucket: Bucket, absent: frozenset[int]) -> set[int]:
        memory, result = self._data[at]
        if not absent:
            self._arithmetic.copy(memory, result)
            return set()
        presence = Buffer(np.empty(len(bucket.slots), np.float32), "float32")
        self._arithmetic.cast(presence, self._moving.result[at].slice(bucket.data_count, bucket.count))
        gained = set()
        for slot, there in zip(bucket.slots, presence.array.tolist(), strict=True):
            if there:
                self._arithmetic.copy(memory.slice(slot.start, slot.stop), result.slice(slot.start, slot.stop))
                if slot.tensor in absent:
                    gained.add(slot.tensor)
        return gained

    def close(self) -> None:
        """Free the buckets; collective."""
        if self._thread:
            self._thread.close()
        self._moving.close()
