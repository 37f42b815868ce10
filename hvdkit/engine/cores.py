"""Which cores the ranks of a host may run on, whoever has said so: hvdrun, the launcher, a cgroup."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.log import logger


def count_cores() -> int:
    """Cores that this process may run on."""
    return len(_allowed())


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class CoresSeen:
    """What a rank sees. allowed: CPUs that it may run on, a bit each. total: CPUs of its host."""

    host: str
    allowed: int
    total: int


def look_at_cores(host: str) -> CoresSeen:
    """What this process sees."""
    return CoresSeen(host, sum(1 << cpu for cpu in _allowed()), os.cpu_count() or 1)


def fair_share(seen: Sequence[CoresSeen], rank: int) -> float:
    """How many cores a rank has, where one that n ranks of its host may run on counts as 1/n. seen: by rank."""
    mine = seen[rank]
    neighbours = [one.allowed for one in seen if one.host == mine.host]
    cpus = (cpu for cpu in range(mine.allowed.bit_length()) if mine.allowed >> cpu & 1)
    return sum(1 / sum(mask >> cpu & 1 for mask in neighbours) for cpu in cpus)


def warn_of_crowding(seen: Sequence[CoresSeen], rank: int) -> None:
    """Say so, on the first of them, if the ranks of this host were bound to fewer CPUs than they are."""
    mine = seen[rank]
    ranks = [at for at, one in enumerate(seen) if one.host == mine.host]
    union = 0
    for at in ranks:
        union |= seen[at].allowed
    cpus = bin(union).count("1")
    if rank != ranks[0] or cpus >= min(len(ranks), mine.total):
        return
    logger.warning(
        "The %d ranks on %s may run on %d of its %d CPUs only, and take turns there. Start them with hvdrun, which "
        "gives each its own; or with srun --cpus-per-task, or mpirun --bind-to none; and without taskset.",
        len(ranks),
        mine.host,
        cpus,
        mine.total,
    )
