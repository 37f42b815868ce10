"""All ranks agree, between two steps, on whether it is time to save or to end; seldom enough to cost nothing."""

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
    """signal: that came to `rank`; 0 for none. save: it is time to."""

    signal: int
    rank: int
    save: bool


class Agreement:
    """Counts steps up to the next one at which the ranks ask each other; the same one on every rank.

    Rank 0 says which that is, by the time that steps take, with each answer. With other ranks it begins anew.
    """

    def __init__(self) -> None:
        self._world: object = None
        self._begin()

    def _begin(self) -> None:
        self._taken, self._due = 0, 1
        self._since_s: float | None = None  # how long a step takes is not known before the second one

    def is_due(self) -> bool:
        """Count a step; is this one at which all ranks ask()?"""
        world = engine.runtime("Checkpoints.step()")
        if world is not self._world:
            self._world = world
            self._begin()
        self._taken += 1
        return self._taken >= self._due

    def ask(self, signal: int, save: bool) -> Agreed:
        """Agree; collective. signal: that came to this rank. save: is it time to, as far as rank 0 knows?"""
        group = global_process_set.group("Checkpoints.step()")
        rank, size = group.transport.rank, group.transport.size
        now = time.monotonic()
        told = np.zeros(3, np.int64)
        told[0] = signal * size + rank if signal else 0
        if rank == 0:
            told[1:] = save, 1 if self._since_s is None else steps_between((now - self._since_s) / self._taken)
        options = reduce_options(["int64"], Max, 1.0, 1.0, "Checkpoints.step()")
        do(group, "allreduce", "checkpoints", [("int64", (3,))], [Buffer(told, "int64")], options)
        self._taken, self._due, self._since_s = 0, int(told[2]), now
        number, from_rank = divmod(int(told[0]), size)
        return Agreed(number, from_rank, bool(told[1]))


def steps_between(step_s: float) -> int:
    """How many steps, of so many seconds, until the ranks ask each other again."""
    return max(1, min(_MOST_STEPS, int(_EVERY_S / max(step_s, 1e-6))))
