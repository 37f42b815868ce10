"""Reductions in steps over a wire: of whole buckets in ordinary memory, or of the shards that cross between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.between.collectives import all_gather_steps, own_range, reduce_scatter_steps, reduce_steps
from hvdkit.transport.between.pipeline import PipelinedExchange
from hvdkit.transport.between.select import BetweenHosts
from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buckets import ALLREDUCE, BucketSpec, InPlaceSegment, Phases, SteppedBuckets, plan_memory, see_as
from hvdkit.transport.buffer import STORAGE, Buffer
from hvdkit.transport.coding.api import Coder
from hvdkit.transport.coding.coders import open_coder, sent_bytes


class WireCrossing:
    """Reduces over all ranks of a wire that no other object uses; all ranks open it together.

    It needs its own wire because steps may run in another thread than a transport's collectives, and each wire requires
    the same order on all ranks. between: chooses the algorithm.
    """

    def __init__(self, wire: Wire, arithmetic: Arithmetic, between: BetweenHosts) -> None:
        self.between = between
        self._wire, self._arithmetic = wire, arithmetic
        self._exchange = PipelinedExchange(wire, wire.messages, arithmetic) if wire.messages is not None else None

    def __call__(
        self,
        numbers: Buffer,
        spec: BucketSpec,
        prescale: float = 1.0,
        *,
        phases: Phases = ALLREDUCE,
        coder: Coder | None = None,
    ) -> Iterator[bool]:
        """Reduce `numbers` (n,) in place and postscale them; steps as in SteppedBuckets.

        numbers: this rank's numbers.
        spec: the bucket's description.
        prescale: spec.prescale if it has not been applied yet, else 1.
        phases: a reduce-scatter makes the sum of shard(n), an all-gather fills in the other ranks' shards.
        coder: spec.wire's coder for these numbers; None if they are not coded.
        """
        if not phases.reduce_scatter:
            yield from all_gather_steps(self._wire, numbers)
            return
        if coder is None and phases.all_gather:
            between, sent = self.between, numbers.count * STORAGE[spec.wire_dtype].itemsize
            algorithm = between.pick(spec.wire_dtype, sent, spec.algorithm)
            if algorithm != "library" and self._exchange is not None:
                yield from self._exchange(numbers, spec, algorithm, between.message_bytes, prescale=prescale)
                return
        if coder is None and not phases.all_gather:
            yield from reduce_scatter_steps(self._wire, numbers, spec, self._arithmetic, prescale)
        elif coder is None:
            at_once, arithmetic = algorithm == "library", self._arithmetic
            yield from reduce_steps(
                self._wire, numbers, numbers, spec, arithmetic=arithmetic, prescale=prescale, at_once=at_once
            )
        else:
            if prescale != 1.0:
                self._arithmetic.combine(numbers, [numbers], scale=prescale)
            yield from coder.steps(self._wire, numbers, numbers)
            if spec.postscale != 1.0:
                self._arithmetic.combine(numbers, [numbers], scale=spec.postscale)

    def shard(self, count: int) -> tuple[int, int]:
        """Return the elements, as (start, stop), that this rank gets from a reduce-scatter of `count` elements."""
        return own_range(self._wire, count)

    def close(self, *, idle: bool = True) -> None:
        """Release the wire; collective. idle: False if a reduction of this rank has not reached its end."""
        self._wire.release(idle=idle)


class WireBuckets(SteppedBuckets):
    """Buckets in ordinary memory, each reduced over all ranks of a wire; all ranks open them together.

    check: see SteppedBuckets.
    """

    def __init__(
        self, crossing: WireCrossing, specs: Sequence[BucketSpec], depth: int | None, check: Callable[[], None]
    ) -> None:
        super().__init__(check)
        crossing.between.check(specs)
        self._specs = list(specs)
        self._crossing = crossing
        pieces = [np.empty(nbytes, np.uint8) for nbytes in plan_memory(specs, depth)]
        self.depth = len(pieces)
        self.memory = [see_as(pieces[at % self.depth], spec) for at, spec in enumerate(specs)]
        self.owned = [(0, 0)] * len(specs)
        self.shard = [crossing.shard(spec.count) for spec in specs]
        self._coders = [open_coder(spec, (0, spec.count)) for spec in specs]
        self.sent_bytes = sum(map(sent_bytes, specs, self._coders, self.memory))

    def steps(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> Iterator[bool]:
        spec, memory = self._specs[index], self.memory[index]
        return self._crossing(memory, spec, spec.prescale, phases=phases, coder=self._coders[index])

    def close(self) -> None:
        idle = not self.busy
        super().close()
        self._crossing.close(idle=idle)
        self.memory, self.owned, self.shard = [], [], []
