"""The contributions of a joined rank to the other ranks' operations, until all ranks have joined.

To a named operation it contributes values that do not change the result (execution.join_contribution), to open plans
zero rounds (planned/used_masks.py). When ranks make a plan, or gather sparse gradients, this rank's optimizer takes
part without gradients of its own.

The end: rank 0 of the group knows when the last rank has joined, and announces that to all ranks in the order of
operations. No rank trains then, so the open zero rounds end on all ranks with the same bucket. This needs a plan that
all ranks still have: the ranks compare their plans, and skip a plan if any rank has deleted its optimizer.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from hvdkit.engine.named.operation import Action
from hvdkit.engine.planned.used_masks import JoinRounds
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import allgather_object


class JoinedPlan(Protocol):
    """The interface of a gradient plan for a joined rank; see BucketReducer in planned/reducer.py."""

    @property
    def next_wait(self) -> str: ...
    def join_rounds(self) -> JoinRounds: ...
    def end_zero_rounds(self) -> None: ...


class Joining:
    """The plans of a group of ranks, and one rank's contributions to them while it waits in join()."""

    def __init__(self) -> None:
        #: Open plans, by name; the names are the same on all ranks.
        self.plans: weakref.WeakValueDictionary[str, JoinedPlan] = weakref.WeakValueDictionary()
        #: Number of rounds of each plan, by name; a new plan of the same name continues the count.
        self.rounds: Counter[str] = Counter()
        #: Number of operations that have become ready.
        self.operations = 0
        #: Name of an operation -> returns this rank's action in it if the rank has not submitted it; None if the owner
        #: of the action no longer exists.
        self.contributions: dict[str, Callable[[], Action | None]] = {}
        #: Objects that forbid join(), each with the error text, which names an alternative.
        self.refusals: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        self._done: weakref.WeakSet[JoinedPlan] = weakref.WeakSet()
        self._wanted: set[str] | None = None
        self._began: tuple[dict[str, int], int] = {}, 0

    def begin(self) -> None:
        """Begin this rank's join."""
        self._began = dict(self.rounds), self.operations
        self._done.clear()
        self._wanted = None

    def action_for(self, name: str) -> Action:
        """Return this rank's action in an operation that it has not submitted, of a kind in WITH_ACTION."""
        action = self.contributions.get(name, lambda: None)()
        if action is None:
            raise HorovodInternalError(
                f"{name} needs the optimizer of this rank, which has joined, but that optimizer no longer exists. "
                "Keep every optimizer until join() returns."
            )
        return action

    def advance(self) -> bool:
        """Advance the zero rounds without waiting. Returns True if there was progress."""
        moved = False
        for plan in list(self.plans.values()):
            if plan not in self._done:
                rounds = plan.join_rounds()
                moved = rounds.advance() or moved
                if rounds.over:
                    plan.end_zero_rounds()
                    self._done.add(plan)
        return moved

    def find_last_joined(self, transport: Transport, last: int) -> int:
        """Find the plans that all ranks have, after all have joined; collective. Returns the rank with most progress.

        last: the rank whose announcement came last. It may have less progress, because announcements can overtake each
        other.
        """
        seen = allgather_object(transport, (list(self.plans), *self._began))
        self._wanted = wanted = set.intersection(*(set(names) for names, _, _ in seen))
        progress = [(sum(rounds.get(name, 0) for name in wanted), operations) for _, rounds, operations in seen]
        return last if progress[last] == max(progress) else progress.index(max(progress))

    @property
    def all_have_joined(self) -> bool:
        """Does this rank know that all ranks have joined, and which plans they all have?"""
        return self._wanted is not None

    @property
    def over(self) -> bool:
        """Have all ranks joined, and are all rounds done?"""
        if self._wanted is None:
            return False
        return all(plan in self._done for name, plan in list(self.plans.items()) if name in self._wanted)


#: Kinds of operations in which a joined rank takes part with an action of its own.
WITH_ACTION = frozenset({"plan", "sparse_gradients", "tune"})
