"""A worker of an elastic job as its driver knows it, and the choice of the ranks of the next world."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from hvdkit_ray.actor import CONTROL, Arrival


@dataclass
class Worker:
    """A worker, with its state as the driver knows it.

    index: the driver's number for it.
    actor: its actor.
    arriving: reference to its next Arrival, or None.
    arrival: its Arrival, while the worker waits for its rank in the next world.
    result: reference to the result of its function, while that runs.
    rank: its rank in its world; -1 for a candidate.
    place: its process and node, once known.
    is_new: is this world its first one?
    finished: has its function returned?
    value: the function's result, if `finished`.
    asked: reference to the answer of its actor, or None.
    asked_s: time of the last query for an answer.
    began_s: time at which it was assigned its rank; for a candidate, time at which its process had started, if known.
    has_entered: its last answer: has it called hvd.init()?
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
        """Note that it was assigned its rank in a world."""
        self.asked, self.has_entered = None, False
        self.asked_s = self.began_s = time.monotonic()

    def ask(self) -> Any:
        """Query its actor; returns a reference to the answer."""
        return self.actor.answer.options(concurrency_group=CONTROL).remote()

    @property
    def has_state(self) -> bool:
        """Does its Arrival report that it has the last commit?"""
        return self.arrival is not None and self.arrival.has_state

    @property
    def name(self) -> str:
        """Its rank or number with its process and node, for messages."""
        return f"{f'rank {self.rank}' if self.rank >= 0 else f'worker {self.index}'} ({self.place})"


def choose_members(members: list[Worker], candidates: list[Worker], most: int) -> list[Worker]:
    """Order the workers of the next world by their future ranks: those with the last commit first.

    candidates: those that are not ready are left out. most: largest number of workers; no member is left out.
    """
    ready = [worker for worker in candidates if worker.arrival is not None]
    return [*sorted(members, key=lambda worker: (not worker.has_state, worker.rank)), *ready][: max(most, len(members))]
