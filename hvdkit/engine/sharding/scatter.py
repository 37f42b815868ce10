"""Gradients of which each rank gets the average of its own pieces only: reduced by the first half of an allreduce."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from hvdkit.engine import runtime
from hvdkit.engine.allreduce import AllReduce, GradientReducer
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.plan import Plan
from hvdkit.engine.planned.presence import Presence
from hvdkit.engine.planned.progress import has_spare_core
from hvdkit.engine.planned.reducer import BucketReducer, Context
from hvdkit.engine.planned.source import Filled, TensorSource
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.sharding.place import Place, may_be_in_place, place_on_host
from hvdkit.engine.strategy import Parameters
from hvdkit.transport.buffer import Buffer


class Receiver(Protocol):
    """What an adapter does with gradients that it does not get back.

    in_place: has the source in-place segments for its gradients, and the source of the values for those? Then their
    sums are received without a copy.
    """

    in_place: bool

    def release(self, tensor: int) -> None:
        """The tensor's gradient has been copied: free its memory."""

    def receive(self, bucket: int, memory: Buffer) -> None:
        """Copy what this rank has of a bucket out of `memory` (data_count,), except what was reduced in place.

        The rest of the memory is undefined.
        """

    def received(self, unused: Collection[int]) -> None:
        """All gradients of a step are there, but for those of tensors that no rank uses."""


class ScatterGradients(AllReduce):
    """Reduce-scatters gradients while backward computes those of the layers before.

    options: as for AllReduce, but without codings. The buckets' settings are the user's own: they are not tuned, since
    the state is divided as they are.
    """

    def __init__(self, options: ReduceOptions, receiver: Receiver) -> None:
        super().__init__(options)
        self.repeatable = False
        #: Where the buckets are to be from the next attach() on; on the host for None.
        self.place: Place | None = None
        self.in_place = receiver.in_place
        self.depth = 0  # buckets that are started and not drained, at most
        self._receiver = receiver
        self._presence: Presence | None = None
        self._source: _ScatterSource | None = None

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach."""
        self.detach()
        super().attach(parameters, group)

    def _open(self, parameters: Parameters, group: Group) -> GradientReducer:
        current = runtime.runtime("a reduction of gradients")
        current.plans += 1
        place, name = self.place or place_on_host(group), parameters.name
        in_place = self.in_place and may_be_in_place(group)
        self._source = _ScatterSource(parameters.gradients, self._receiver, in_place)
        context = Context(
            group.transport,
            name,
            group.engine,
            current.timeline,
            has_spare_core(current.cores, parameters.compute_threads),
            open_buckets=place.open_buckets,
            open_masks=lambda _, __: _NoMasks(),
            device=place.device,
            scatters=True,
        )
        reducer = BucketReducer(
            context,
            parameters.tensors,
            self._source,
            options=self.options,
            settings=place.settings,
            statistics=self.statistics,
        )
        self.depth = reducer.depth
        told = Context(group.transport, f"{name}.used", group.engine)
        self._presence = Presence(told, [tensor.name for tensor in parameters.tensors], place.settings)
        return reducer

    def before_step(self) -> None:
        """See Strategy.before_step. Raises RankLostError, with the parameters concerned, if a rank has ended."""
        super().before_step()
        source, presence = self._source, self._presence
        if source is not None and presence is not None:
            self._receiver.received(presence.tell(source.take_unused()))

    def detach(self) -> None:
        """See Strategy.detach."""
        super().detach()
        if self._presence is not None:
            self._presence.close()
        self._presence = self._source = None


class _ScatterSource:
    """A source whose gradients are taken from it, and given to a receiver in pieces. in_place: may they be?"""

    def __init__(self, source: TensorSource, receiver: Receiver, in_place: bool) -> None:
        self._source, self._receiver, self._in_place = source, receiver, in_place
        self._plan = Plan((), ())
        self._left: list[int] = []  # of each tensor the elements that have not been copied in this round
        self._unused: set[int] = set()

    def on_plan(self, plan: Plan) -> None:
        self._plan = plan
        self._source.on_plan(plan)
        self._begin()

    def _begin(self) -> None:
        self._left = [tensor.count for tensor in self._plan.tensors]
        self._unused.clear()

    def take_unused(self) -> frozenset[int]:
        """The tensors that this rank did not use in the round, which ends."""
        unused = frozenset(self._unused)
        self._begin()
        return unused

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int], /) -> Filled:
        filled = self._source.fill(bucket, memory, owned if self._in_place else (0, 0))
        self._unused |= filled.locally_unused
        for slot in self._plan.buckets[bucket].slots:
            self._left[slot.tensor] -= slot.stop - slot.start
            if not self._left[slot.tensor]:
                self._receiver.release(slot.tensor)
        return Filled(frozenset(), filled.in_place)

    def drain(self, bucket: int, memory: Buffer, _: Collection[int], /) -> None:
        self._receiver.receive(bucket, memory)


class _NoMasks:
    """See Masks: after a reduce-scatter no rank has all of them, so that Presence tells instead."""

    def mark(self, _: int, __: frozenset[int], /) -> None:
        pass

    def globally_unused(self, _: int, /) -> Collection[int]:
        return ()

    def anyone_trains(self, _: int, /) -> bool:
        return False
