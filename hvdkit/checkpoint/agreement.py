"""Agreement of all ranks, between two steps, on whether to save a checkpoint or to end the job."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from hvdkit.engine import runtime as engine
from hvdkit.engine.groups import global_process_set
from hvdkit.engine.named.submit import do, reduce_options
from hvdkit.engine.reduce_op import Max
from hvdkit.transport.buffer import Buffer

_EVERY_S = 0.5
_MOST_STEPS = 32  # because steps may suddenly become slower


@dataclass(frozen=True)
class Agreed:
    """The action of all ranks after this step.

    signal: number of the signal that `rank` received; 0 for none. save: a checkpoint is due.
    """

    signal: int
    rank: int
    save: bool


class Agreement:
    """Counts steps up to the next allreduce of signals and due checkpoints, which is in the same step on every rank.

    In each allreduce rank 0 chooses the step of the next, from the duration of steps, so that an allreduce comes about
    every 0.5 s. After a new init() the count starts again.
    """

    def __init__(self) -> None:
        self._world: object = None
        self._begin()

    def _begin(self) -> None:
        self._taken, self._due = 0, 1
        self._since_s: float | None = None  # the duration of a step is not known before the second one

    def is_due(self) -> bool:
        """Count a step; return whether all ranks must call ask() after it."""
        world = engine.runtime("Checkpoints.step()")
        if world is not self._world:
            self._world = world
            self._begin()
        self._taken += 1
        return self._taken >= self._due

    def ask(self, signal: int, save: bool) -> Agreed:
        """Agree; collective. signal: received by this rank; 0 for none. save: a checkpoint is due; used on rank 0."""
        group = global_process_set.group("Checkpoints.step()")
        rank, size = group.transport.rank, group.transport.size
        now = time.monotonic()
        message = np.zeros(3, np.int64)
        message[0] = signal * size + rank if signal else 0
        if rank == 0:
            message[1:] = save, 1 if self._since_s is None else steps_between((now - self._since_s) / self._taken)
        options = reduce_options(["int64"], Max, 1.0, 1.0, "Checkpoints.step()")
        do(group, "allreduce", "checkpoints", [("int64", (3,))], [Buffer(message, "int64")], options)
        self._taken, self._due, self._since_s = 0, int(message[2]), now
        number, from_rank = divmod(int(message[0]), size)
        return Agreed(number, from_rank, bool(message[1]))


def steps_between(step_s: float) -> int:
    """Return the number of steps of `step_s` seconds until the next agreement."""
    return max(1, min(_MOST_STEPS, int(_EVERY_S / max(step_s, 1e-6))))
