"""Exchanges in host memory which gradients the ranks have in a step, before a device reduces the gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.engine.planned.reducer import BucketReducer, Context, Statistics
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.engine.planned.source import Filled
from hvdkit.engine.request import ReduceOptions
from hvdkit.transport.buffer import Buffer


class UsedMaskExchange:
    """Finds in each step the tensors without a gradient on any rank, and notifies joined ranks of the step.

    It is a plan of tensors without elements: only their used masks are reduced. Opened, and closed, by all ranks
    together. context: of that plan. names: of the tensors. settings: of the plan.
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
        """Register a function that a joined rank calls for each tell() of the other ranks; None for no function."""
        self._reducer.on_zero_round = take_part

    def exchange(self, missing: frozenset[int]) -> Collection[int]:
        """Return the tensors without a gradient on any rank; none if this rank has all gradients. Collective.

        missing: the tensors without a gradient on this rank.
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
    """The TensorSource of tensors without elements."""

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
