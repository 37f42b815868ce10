"""The cores that the ranks of a host may run on, as hvdrun, the launcher or a cgroup has set them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.log import logger


def count_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(_allowed())


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class CoresSeen:
    """The CPUs of a rank. allowed: the CPUs that it may run on, bit n for CPU n. total: number of CPUs of its host."""

    host: str
    allowed: int
    total: int


def look_at_cores(host: str) -> CoresSeen:
    """Return the CPUs of this process."""
    return CoresSeen(host, sum(1 << cpu for cpu in _allowed()), os.cpu_count() or 1)


def fair_share(seen: Sequence[CoresSeen], rank: int) -> float:
    """Return a rank's number of cores; a core that n ranks of its host share counts as 1/n. seen: of all ranks."""
    mine = seen[rank]
    neighbours = [rank_cores.allowed for rank_cores in seen if rank_cores.host == mine.host]
    cpus = (cpu for cpu in range(mine.allowed.bit_length()) if mine.allowed >> cpu & 1)
    return sum(1 / sum(mask >> cpu & 1 for mask in neighbours) for cpu in cpus)


def warn_of_crowding(seen: Sequence[CoresSeen], rank: int) -> None:
    """Log a warning on the first rank of this host if its ranks are bound to fewer CPUs than there are ranks."""
    mine = seen[rank]
    ranks = [at for at, rank_cores in enumerate(seen) if rank_cores.host == mine.host]
    union = 0
    for at in ranks:
        union |= seen[at].allowed
    cpus = bin(union).count("1")
    if rank != ranks[0] or cpus >= min(len(ranks), mine.total):
        return
    logger.warning(
        "The %d ranks on %s are bound to %d of its %d CPUs and compete for them. Start the job with hvdrun, which "
        "binds each rank to CPUs of its own, or with srun --cpus-per-task or mpirun --bind-to none. Do not start it "
        "under taskset.",
        *(len(ranks), mine.host, cpus, mine.total),
    )
