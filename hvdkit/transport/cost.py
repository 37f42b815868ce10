"""What an allreduce between hosts costs, by algorithm: a model in three measured numbers.

The algorithms and their costs are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), with what a rank pays to have several messages under way added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2


@dataclass(frozen=True)
class Link:
    """Between any two hosts, as measured.

    latency_s: seconds until a message without bytes is there. byte_s: seconds for each byte of one direction.
    message_s: what a rank pays for each message, however many are under way.
    """

    latency_s: float
    byte_s: float
    message_s: float = 0.0


def ring_s(link: Link, hosts: int, nbytes: float) -> float:
    """Seconds: pieces go around twice."""
    rounds = 2 * (hosts - 1)
    return rounds * (link.latency_s + link.message_s + link.byte_s * nbytes / hosts)


def doubling_s(link: Link, hosts: int, nbytes: float) -> float:
    """Seconds: all of it to a partner twice as far each time; hosts beyond a power of two give and take at the ends."""
    rounds = int(log2(hosts)) + (0 if hosts & (hosts - 1) == 0 else 2)
    return rounds * (link.latency_s + link.message_s + link.byte_s * nbytes)


def halving_s(link: Link, hosts: int, nbytes: float) -> float:
    """Seconds: recursive halving, then doubling (Rabenseifner)."""
    whole = hosts & (hosts - 1) == 0
    within = 1 << int(log2(hosts))
    seconds = 2 * int(log2(hosts)) * (link.latency_s + link.message_s)
    seconds += 2 * link.byte_s * nbytes * (within - 1) / within
    return seconds if whole else seconds + 2 * (link.latency_s + link.message_s + link.byte_s * nbytes)


def pieces_s(link: Link, hosts: int, nbytes: float) -> float:
    """Seconds: a piece straight to everyone, and its sum straight back."""
    others = hosts - 1
    return 2 * (link.latency_s + others * link.message_s + link.byte_s * nbytes * others / hosts)


def tree_s(link: Link, hosts: int, nbytes: float) -> float:
    """Seconds: up a binary tree and down again."""
    return 2 * ceil(log2(hosts)) * (link.latency_s + link.message_s + link.byte_s * nbytes)


ALGORITHMS: dict[str, Callable[[Link, int, float], float]] = {
    "ring": ring_s,
    "doubling": doubling_s,
    "halving": halving_s,
    "pieces": pieces_s,
    "tree": tree_s,
}


def cheapest(link: Link, hosts: int, nbytes: float) -> str:
    """The algorithm that the model says is done first; "pieces" for one host."""
    return "pieces" if hosts < 2 else min(ALGORITHMS, key=lambda name: ALGORITHMS[name](link, hosts, nbytes))
