"""Reduce-scatter of gradients, the first half of an allreduce: each rank gets the average of its own shards only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from hvdkit.engine import runtime
from hvdkit.engine.allreduce import AllReduce, GradientReducer
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.plan import Plan
from hvdkit.engine.planned.progress import has_spare_core
from hvdkit.engine.planned.reducer import BucketReducer, Context
from hvdkit.engine.planned.source import Filled, TensorSource
from hvdkit.engine.planned.used_mask_exchange import UsedMaskExchange
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.sharding.bucket_memory import BucketMemory, may_be_in_place, memory_on_host
from hvdkit.engine.strategy import Parameters
from hvdkit.transport.buffer import Buffer


class GradientSink(Protocol):
    """Consumes reduce-scattered gradients, for an adapter.

    in_place: Do the sources of gradients and of values have in-place segments? Then sums are received without a copy.
    """

    in_place: bool

    def release(self, tensor: int) -> None:
        """Free the memory of the tensor's gradient, which has been copied."""

    def receive(self, bucket: int, memory: Buffer) -> None:
        """Copy this rank's pieces of a bucket out of `memory` (data_count,), except in-place segments.

        The rest of the memory is undefined.
        """

    def received(self, unused: Collection[int]) -> None:
        """Called when all gradients of a step have been received. unused: tensors that no rank uses."""


class ScatterGradients(AllReduce):
    """Reduce-scatters gradients while backward computes the gradients of earlier layers.

    options: as for AllReduce, but without codings. sink: consumes the gradients. The buckets have the user's
    settings: these are not tuned, because the state is divided like the buckets.
    """

    def __init__(self, options: ReduceOptions, sink: GradientSink) -> None:
        super().__init__(options)
        self.repeatable = False
        self.in_place = sink.in_place
        self.depth = 0  # maximum number of buckets that are started and not drained
        self._sink = sink
        self._memory: BucketMemory | None = None
        self._presence: UsedMaskExchange | None = None
        self._source: _ScatterSource | None = None

    def attach(self, parameters: Parameters, group: Group, memory: BucketMemory | None = None) -> None:
        """See Strategy.attach. memory: device and settings of the buckets; None for the host."""
        self.detach()
        self._memory = memory
        super().attach(parameters, group)

    def _open(self, parameters: Parameters, group: Group) -> GradientReducer:
        current = runtime.runtime("a reduction of gradients")
        current.plans += 1
        memory, name = self._memory or memory_on_host(group), parameters.name
        in_place = self.in_place and may_be_in_place(group)
        self._source = _ScatterSource(parameters.gradients, self._sink, in_place)
        context = Context(
            group.transport,
            name,
            group.engine,
            current.timeline,
            has_spare_core(current.cores, parameters.compute_threads),
            open_buckets=memory.open_buckets,
            open_masks=lambda _, __: _NoMasks(),
            device=memory.device,
            scatters=True,
        )
        reducer = BucketReducer(
            context,
            parameters.tensors,
            self._source,
            options=self.options,
            settings=memory.settings,
            statistics=self.statistics,
        )
        self.depth = reducer.depth
        mask_context = Context(group.transport, f"{name}.used", group.engine)
        self._presence = UsedMaskExchange(mask_context, [tensor.name for tensor in parameters.tensors], memory.settings)
        return reducer

    def before_step(self) -> None:
        """See Strategy.before_step. Raises RankLostError, with the parameters concerned, if a rank has ended."""
        super().before_step()
        source, presence = self._source, self._presence
        if source is not None and presence is not None:
            self._sink.received(presence.exchange(source.take_unused()))

    def detach(self) -> None:
        """See Strategy.detach."""
        super().detach()
        if self._presence is not None:
            self._presence.close()
        self._presence = self._source = None


class _ScatterSource:
    """Fills buckets from a source of gradients, and passes results to a sink. in_place: use in-place segments."""

    def __init__(self, source: TensorSource, sink: GradientSink, in_place: bool) -> None:
        self._source, self._sink, self._in_place = source, sink, in_place
        self._plan = Plan((), ())
        self._left: list[int] = []  # for each tensor the number of elements that are not copied yet in this round
        self._unused: set[int] = set()

    def on_plan(self, plan: Plan) -> None:
        self._plan = plan
        self._source.on_plan(plan)
        self._begin()

    def _begin(self) -> None:
        self._left = [tensor.count for tensor in self._plan.tensors]
        self._unused.clear()

    def take_unused(self) -> frozenset[int]:
        """Return the tensors that this rank did not use in the round, and end the round."""
        unused = frozenset(self._unused)
        self._begin()
        return unused

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int], /) -> Filled:
        filled = self._source.fill(bucket, memory, owned if self._in_place else (0, 0))
        self._unused |= filled.locally_unused
        for slot in self._plan.buckets[bucket].slots:
            self._left[slot.tensor] -= slot.stop - slot.start
            if not self._left[slot.tensor]:
                self._sink.release(slot.tensor)
        return Filled(frozenset(), filled.in_place)

    def drain(self, bucket: int, memory: Buffer, _: Collection[int], /) -> None:
        self._sink.receive(bucket, memory)


class _NoMasks:
    """Masks that do nothing: after a reduce-scatter no rank has a whole mask, so UsedMaskExchange does it."""

    def mark(self, _: int, __: frozenset[int], /) -> None:
        pass

    def globally_unused(self, _: int, /) -> Collection[int]:
        return ()

    def anyone_trains(self, _: int, /) -> bool:
        return False
