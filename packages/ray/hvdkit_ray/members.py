"""A worker of an elastic job as its driver knows it, and which of them are the ranks of the next world."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from hvdkit_ray.actor import CONTROL, Arrival


@dataclass
class Worker:
    """An actor. rank: in its world; -1 for a candidate. place: its process and node, once it is known. is_new: is this
    world its first one?

    arriving: reference to its next Arrival, or None. arrival: that has come, while the worker waits for its place.
    result: reference to what its function returns, while it runs. value: what it has returned, if `finished`. asked,
    asked_s: reference to the answer of its actor, or None, and when it was asked for it. began_s: when it got its
    place, or for a candidate when its process had started, if that is known. has_entered: as it has answered last.
    """

    index: int
    actor: Any
    arriving: Any
    arrival: Arrival | None = None
    result: Any = None
    rank: int = -1
    place: str = "not started"
    is_new: bool = False
    finished: bool = False
    value: Any = None
    asked: Any = None
    asked_s: float = field(default_factory=time.monotonic)
    began_s: float | None = None
    has_entered: bool = False

    def begin(self) -> None:
        """It has got its place in a world."""
        self.asked, self.has_entered = None, False
        self.asked_s = self.began_s = time.monotonic()

    def ask(self) -> Any:
        """A reference to the answer of its actor."""
        return self.actor.answer.options(concurrency_group=CONTROL).remote()

    @property
    def has_state(self) -> bool:
        """Has it said that it has the last commit?"""
        return self.arrival is not None and self.arrival.has_state

    @property
    def name(self) -> str:
        """For messages."""
        return f"{f'rank {self.rank}' if self.rank >= 0 else f'worker {self.index}'} ({self.place})"


def choose_members(members: list[Worker], candidates: list[Worker], most: int) -> list[Worker]:
    """The workers of the next world in the order in which they become ranks: those with the last commit first.

    candidates: those that are not ready are left out. most: number of workers; no member is left out.
    """
    ready = [worker for worker in candidates if worker.arrival is not None]
    return [*sorted(members, key=lambda worker: (not worker.has_state, worker.rank)), *ready][: max(most, len(members))]
