"""The cores of a host shared out among its ranks. divide() and divide_near() plan, bind() acts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .topology import Cpu, parse_cpus, read_topology


class Share(NamedTuple):
    """What a rank has of its host. cpus: that it may run on. threads: to compute with, one a core. bound: by hvdkit."""

    cpus: frozenset[int]
    threads: int
    bound: bool = False


def divide(cpus: Sequence[Cpu], ranks: int, kind: str) -> list[Share] | None:
    """Share out CPUs among the ranks of a host, in their order; None if there are fewer cores than ranks.

    Each rank gets whole cores that follow each other, at least its part of them rounded down; they are of one node
    unless someone would have fewer for that. kind: "core" for just these, "numa" for all CPUs of the nodes that they
    are of.
    """
    cores: dict[tuple[int, int], list[Cpu]] = {}
    for cpu in sorted(cpus, key=lambda one: (one.node, one.core, one.number)):
        cores.setdefault((cpu.node, cpu.core), []).append(cpu)
    if len(cores) < ranks:
        return None
    nodes: dict[int, set[int]] = {}
    for cpu in cpus:
        nodes.setdefault(cpu.node, set()).add(cpu.number)
    shares = []
    for names in _cut(list(cores), ranks):
        mine = {cpu.number for name in names for cpu in cores[name]}
        if kind == "numa":
            mine = set().union(*(nodes[node] for node, _ in names))
        shares.append(Share(frozenset(mine), len(names), bound=True))
    return shares


def divide_near(cpus: Sequence[Cpu], near: Sequence[str], kind: str) -> list[Share] | None:
    """Share out the CPUs near GPUs among the ranks that have these GPUs; None if some would have no core of its own.

    near: the CPUs near the GPU of each rank, as "0-31". kind: see divide(). CPUs that are near no rank's GPU go unused.
    """
    ranks: dict[tuple[Cpu, ...], list[int]] = {}  # by the CPUs near their GPUs
    for at, text in enumerate(near):
        numbers = set(parse_cpus(text))
        ranks.setdefault(tuple(cpu for cpu in cpus if cpu.number in numbers), []).append(at)
    if len({cpu for mine in ranks for cpu in mine}) < sum(map(len, ranks)):
        return None  # what is near one GPU is partly near another
    found: dict[int, Share] = {}
    for mine, places in ranks.items():
        shares = divide(mine, len(places), kind)
        if shares is None:
            return None
        found.update(zip(places, shares, strict=True))
    return [found[at] for at in range(len(near))]


def _cut(cores: Sequence[tuple[int, int]], ranks: int) -> list[Sequence[tuple[int, int]]]:
    """Cut (node, core), in order, into a piece for each rank."""
    by_node: dict[int, list[tuple[int, int]]] = {}
    for core in cores:
        by_node.setdefault(core[0], []).append(core)
    least = len(cores) // ranks
    room = [len(of_node) // least for of_node in by_node.values()]  # ranks that find `least` cores on each node
    if ranks < len(by_node) or sum(room) < ranks:
        return _even(cores, ranks)
    counts = [0] * len(room)
    sizes = [len(of_node) for of_node in by_node.values()]
    for _ in range(ranks):  # where there are most cores for one more
        open_nodes = [at for at, most in enumerate(room) if counts[at] < most]
        counts[max(open_nodes, key=lambda at: sizes[at] / (counts[at] + 1))] += 1
    pieces = zip(by_node.values(), counts, strict=True)
    return [piece for of_node, count in pieces if count for piece in _even(of_node, count)]


def _even(cores: Sequence[tuple[int, int]], pieces: int) -> list[Sequence[tuple[int, int]]]:
    edges = [len(cores) * piece // pieces for piece in range(pieces + 1)]
    return [cores[edges[piece] : edges[piece + 1]] for piece in range(pieces)]


def plan_share(allowed: Collection[int], order: Mapping[str, Any], local_size: int) -> Share:
    """Find out what this rank has.

    allowed: CPUs that it may run on as it was started. order: see hvdkit.launch.plan.registration; {} without hvdrun.
    local_size: ranks of this host; 0 if that is not known.
    """
    if "divide" in order:
        ranks = int(order["ranks"])
        cpus, kind, near = read_topology(order["divide"]), str(order["kind"]), order.get("near")
        shares = (divide_near(cpus, near, kind) if near else None) or divide(cpus, ranks, kind)
        return shares[int(order["at"])] if shares else Share(frozenset(allowed), 1)
    cores = len({cpu.core for cpu in read_topology(allowed)})
    return Share(frozenset(allowed), max(1, cores // (int(order.get("sharers", 0)) or local_size or 1)))


def allowed_cpus() -> frozenset[int]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


@contextlib.contextmanager
def bind(share: Share) -> Iterator[str]:
    """What is started in here is bound to the share's CPUs; gives what prevents it, or ""."""
    if not share.bound:
        yield ""
        return
    before = os.sched_getaffinity(0)
    problem = ""
    try:
        os.sched_setaffinity(0, share.cpus)
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        yield problem
    finally:
        os.sched_setaffinity(0, before)
