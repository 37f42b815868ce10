"""What happens to a job, and when: drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    what: in words. weight: how often it is drawn, of the sum of all. ends_rank: a rank ends by it, so another one has
    to be there. ends_job: the job may end by it, with a clear code, and the same command then goes on.
    """

    what: str
    weight: int
    ends_rank: bool = False
    ends_job: bool = False


#: On one host.
LOCAL = {
    "kill": Kind("kill -9 of a rank", 28, ends_rank=True),
    "error": Kind("an exception on a rank", 18, ends_rank=True),
    "slow": Kind("a rank is slow for 2 s", 14),
    "stop": Kind("SIGSTOP of a rank, for 5 s", 6),
    "newcomer": Kind("kill -9 of a rank that is on its way in", 6, ends_rank=True),
    "term": Kind("SIGTERM to a rank or to hvdrun", 8, ends_job=True),
    "truncate": Kind("the same, and the newest checkpoint is cut short", 6, ends_job=True),
    "disk": Kind("the disk of the checkpoints is full", 7),
    "shm": Kind("/dev/shm is full, and a rank is killed", 7, ends_rank=True, ends_job=True),
}
#: On three hosts, a rank on each.
BETWEEN = {
    "cut": Kind("a host's link is down for 2 s", 5),
    "lost": Kind("a host's link is down for good", 3, ends_job=True),
}
KINDS = {**BETWEEN, **LOCAL}
#: One job of so many is on three hosts.
_BETWEEN_EVERY = 8
_A_JOB, _A_JOB_BETWEEN = 12, 5
_PAUSE_S = 0.5


@dataclass(frozen=True)
class Fault:
    """after_s: since the fault before has been got over. victim, mood: pick to whom, and how; from 0 to 1."""

    kind: str
    after_s: float
    victim: float
    mood: float


@dataclass(frozen=True)
class Plan:
    """A job, and what happens to it. between: on three hosts. commit_every: steps."""

    seed: int
    between: bool
    ranks: int
    commit_every: int
    faults: tuple[Fault, ...]


def draw(seed: int, faults: int) -> Plan:
    """The plan of this seed, with so many faults at most."""
    drawn = random.Random(seed)
    between = seed % _BETWEEN_EVERY == _BETWEEN_EVERY - 1
    kinds = BETWEEN if between else LOCAL
    names, weights = list(kinds), [kind.weight for kind in kinds.values()]
    return Plan(
        seed,
        between,
        3 if between else drawn.randint(2, 4),
        drawn.randint(1, 8),
        tuple(
            Fault(drawn.choices(names, weights)[0], drawn.random() * _PAUSE_S, drawn.random(), drawn.random())
            for _ in range(min(faults, _A_JOB_BETWEEN) if between else faults)
        ),
    )


def draw_until(seed: int, faults: int) -> Iterator[Plan]:
    """Plans of this seed and those after it, with so many faults in all; jobs on several hosts have fewer each."""
    while faults > 0:
        plan = draw(seed, min(faults, _A_JOB))
        yield plan
        faults -= len(plan.faults)
        seed += 1
