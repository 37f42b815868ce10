"""Which ranks of a host hvdkit binds to cores, and which it leaves as they were started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def plan_cores(allowed: Mapping[int, Sequence[int]], wish: str) -> dict[int, dict[str, Any]]:
    """Tell the agents of one host what each rank does about cores; they know what those are.

    allowed: by rank, the CPUs that it may run on as it was started. wish: the setting `bind`.
    An order is {"divide": CPUs, "kind": "core" or "numa", "at": which share, "ranks": of how many}, or, where a rank
    stays as it is, {"sharers": how many ranks use the same cores}.
    """
    ranks = sorted(allowed)
    known = all(allowed.values())
    alike = len({tuple(cpus) for cpus in allowed.values()}) == 1  # if not, the launcher has bound them
    if not known or len(ranks) < 2 or wish == "none" or (wish == "auto" and not alike):
        users = Counter(cpu for cpus in allowed.values() for cpu in cpus)
        return {rank: {"sharers": max((users[cpu] for cpu in allowed[rank]), default=len(ranks))} for rank in ranks}
    cpus = sorted(set().union(*allowed.values()))
    kind = "numa" if wish == "numa" else "core"
    return {rank: {"divide": cpus, "kind": kind, "at": at, "ranks": len(ranks)} for at, rank in enumerate(ranks)}
