"""The part of a joined rank in the other ranks' operations: all of these at once, until all ranks have joined.

To a named operation it contributes values that do not change the result (execution.join_contribution), to open plans
zero rounds (planned/used_masks.py). Where ranks make a plan, or gather sparse gradients, this rank's optimizer takes
part without gradients of its own.

The end: rank 0 of the group knows when the last rank has joined, and tells all, in the order of operations. Nobody
trains then, so the zero rounds that are open end on all ranks with the same bucket. That takes a plan that all of them
still have: one that belongs to an optimizer which some rank has dropped already is left out, after asking.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from hvdkit.engine.named.operation import Action
from hvdkit.engine.planned.used_masks import ZeroRounds
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import allgather_object


class JoinedPlan(Protocol):
    """A plan of gradients as a rank sees it that has joined; see BucketReducer in planned/reducer.py."""

    def zero_rounds(self) -> ZeroRounds: ...
    def end_zero_rounds(self) -> None: ...


class Joining:
    """The plans of a group of ranks, and one rank's part in them while it waits in join()."""

    def __init__(self) -> None:
        #: Open plans, by the names that all ranks know them by.
        self.plans: weakref.WeakValueDictionary[str, JoinedPlan] = weakref.WeakValueDictionary()
        #: How often each plan has been gone through, by name; this counts on when a plan is made anew.
        self.rounds: Counter[str] = Counter()
        #: How many operations have become ready.
        self.operations = 0
        #: What to do in an operation, by name, that this rank has not submitted; a method of something that may go.
        self.contributions: dict[str, Callable[[], Action | None]] = {}
        #: What goes on only if no rank joins, and what to do instead of join(), in words.
        self.refusals: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        self._done: weakref.WeakSet[JoinedPlan] = weakref.WeakSet()
        self._wanted: set[str] | None = None
        self._began: tuple[dict[str, int], int] = {}, 0

    def begin(self) -> None:
        """This rank joins."""
        self._began = dict(self.rounds), self.operations
        self._done.clear()
        self._wanted = None

    def action_for(self, name: str) -> Action:
        """This rank's part of an operation, of a kind in WITH_ACTION, that it has not submitted."""
        action = self.contributions.get(name, lambda: None)()
        if action is None:
            raise HorovodInternalError(
                f"{name} needs the optimizer of this rank, which has joined, but that optimizer no longer exists. "
                "Keep every optimizer until join() returns."
            )
        return action

    def advance(self) -> bool:
        """Do what can be done in the zero rounds without waiting; True if anything moved."""
        moved = False
        for plan in list(self.plans.values()):
            if plan not in self._done:
                rounds = plan.zero_rounds()
                moved = rounds.advance() or moved
                if rounds.over:
                    plan.end_zero_rounds()
                    self._done.add(plan)
        return moved

    def settle(self, transport: Transport, last: int) -> int:
        """All ranks have joined; find out which plans all of them have, and who has come farthest. Collective.

        last: the rank whose announcement came last, which need not be the one that has: announcements may overtake.
        """
        seen = allgather_object(transport, (list(self.plans), *self._began))
        self._wanted = wanted = set.intersection(*(set(names) for names, _, _ in seen))
        progress = [(sum(rounds.get(name, 0) for name in wanted), operations) for _, rounds, operations in seen]
        return last if progress[last] == max(progress) else progress.index(max(progress))

    @property
    def all_have_joined(self) -> bool:
        """Is that known here, and what is to be ended then?"""
        return self._wanted is not None

    @property
    def over(self) -> bool:
        """Have all ranks joined, and are all rounds done?"""
        if self._wanted is None:
            return False
        return all(plan in self._done for name, plan in list(self.plans.items()) if name in self._wanted)


#: Kinds of operations that a rank which has joined takes part in with an action of its own.
WITH_ACTION = frozenset({"plan", "sparse_gradients", "tune"})
