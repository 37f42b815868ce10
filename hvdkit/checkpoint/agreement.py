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
_MOST_STEPS = 32  # steps may become slower all at once


@dataclass(frozen=True)
class Agreed:
    """What all ranks do after this step.

    signal: number of the signal that `rank` received; 0 for none. save: is a checkpoint due?
    """

    signal: int
    rank: int
    save: bool


class Agreement:
    """Counts steps up to the next allreduce of what the ranks know; the same step on every rank.

    Rank 0 chooses that step in each allreduce, by the time that steps take, so that one comes about every 0.5 s. After
    a new init() the count begins anew.
    """

    def __init__(self) -> None:
        self._world: object = None
        self._begin()

    def _begin(self) -> None:
        self._taken, self._due = 0, 1
        self._since_s: float | None = None  # the duration of a step is not known before the second one

    def is_due(self) -> bool:
        """Count a step; do all ranks call ask() after it?"""
        world = engine.runtime("Checkpoints.step()")
        if world is not self._world:
            self._world = world
            self._begin()
        self._taken += 1
        return self._taken >= self._due

    def ask(self, signal: int, save: bool) -> Agreed:
        """Agree; collective. signal: that this rank received. save: is a checkpoint due? Only that of rank 0 counts."""
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
    """How many steps of `step_s` seconds come before the next agreement."""
    return max(1, min(_MOST_STEPS, int(_EVERY_S / max(step_s, 1e-6))))
