"""What happens to a job, and when: drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: What happens to a rank -> does it end by that?
KINDS = {"kill": True, "term": True, "error": True, "stop": False, "sleep": False}


@dataclass(frozen=True)
class Fault:
    """after_s: since the fault before. victim: picks one of the ranks that are there, from 0 up to 1."""

    kind: str
    after_s: float
    victim: float


@dataclass(frozen=True)
class Plan:
    """A job, and what happens to it. commit_every: steps."""

    seed: int
    ranks: int
    commit_every: int
    faults: tuple[Fault, ...]


def draw(seed: int, faults: int) -> Plan:
    """The plan of this seed, with so many faults."""
    drawn = random.Random(seed)
    return Plan(
        seed,
        drawn.randint(2, 4),
        drawn.randint(1, 8),
        tuple(Fault(drawn.choice(list(KINDS)), 2 * drawn.random(), drawn.random()) for _ in range(faults)),
    )
