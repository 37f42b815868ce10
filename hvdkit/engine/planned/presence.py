"""Which gradients the ranks have in a step, told through the host's memory before these are reduced on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.engine.planned.reducer import BucketReducer, Context, Statistics
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.engine.planned.source import Filled
from hvdkit.engine.request import ReduceOptions
from hvdkit.transport.buffer import Buffer


class Presence:
    """Tells in each step which tensors no rank has a gradient of, and ranks that have joined that there is a step.

    It is a plan of tensors without elements: what is reduced are their used masks. Opened, and closed, by all ranks
    together. context: of that plan. names: of the tensors.
    """

    def __init__(self, context: Context, names: Sequence[str], settings: PlanSettings) -> None:
        self._source = _NoNumbers()
        self._reducer = BucketReducer(
            context,
            [TensorSpec(name, 0, "float32") for name in names],
            self._source,
            options=ReduceOptions(average=False),
            settings=dataclasses.replace(settings, progress="inline"),
            statistics=Statistics(),
        )

    def on_zero_round(self, take_part: Callable[[], None] | None) -> None:
        """Have take_part() called on this rank, once it has joined, for each call of tell() by others."""
        self._reducer.on_zero_round = take_part

    def tell(self, missing: frozenset[int]) -> Collection[int]:
        """Say which tensors this rank has no gradient of; returns those of them that no rank has one of. Collective.

        Raises RankLostError if a rank has ended.
        """
        self._source.missing, self._source.unused = missing, set()
        self._reducer.finish()
        return self._source.unused

    def close(self) -> None:
        """Free the buckets; collective."""
        self._reducer.on_zero_round = None
        self._reducer.close()


class _NoNumbers:
    """See TensorSource: tensors without elements."""

    def __init__(self) -> None:
        self.missing: frozenset[int] = frozenset()
        self.unused: set[int] = set()
        self._plan = Plan((), ())

    def on_plan(self, plan: Plan) -> None:
        self._plan = plan

    def fill(self, bucket: int, _: Buffer, __: tuple[int, int], /) -> Filled:
        return Filled(self.missing & self._plan.buckets[bucket].needs)

    def drain(self, _: int, __: Buffer, globally_unused: Collection[int], /) -> None:
        self.unused.update(globally_unused)
