"""The cost of an allreduce between hosts, by algorithm: a model in a few measured numbers.

The algorithms and their costs are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), with what a rank pays to have several messages under way added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2

#: What is cut into messages of these sizes: the smallest goes without a handshake in every MPI that is known to us.
MESSAGE_BYTES = (60_000, 240_000, 960_000, 3_840_000)
_MESSAGE_SHARE = 0.1  # of a message's time may be what it costs to have a message at all


@dataclass(frozen=True)
class Link:
    """Between any two hosts, as measured.

    latency_s: seconds until a message without bytes is there. byte_s: seconds for each byte of one direction.
    message_s: what a rank pays for each message, however many are under way.
    """

    latency_s: float
    byte_s: float
    message_s: float = 0.0

    @property
    def message_bytes(self) -> int:
        """How large messages should be: the smallest of MESSAGE_BYTES whose bytes take ten times what a message costs.

        Small ones fill the pipeline sooner; on a fast link the number of messages counts.
        """
        worth = self.message_s / _MESSAGE_SHARE
        return next((size for size in MESSAGE_BYTES if size * self.byte_s >= worth), MESSAGE_BYTES[-1])


def doubling_s(link: Link, hosts: int, nbytes: float) -> float:
    """Seconds: all of it to a partner twice as far each time; hosts beyond a power of two give and take at the ends.

    What these give goes one way while what they take goes the other, so it is on the wire at the same time.
    """
    more = 0 if hosts & (hosts - 1) == 0 else 1
    rounds = int(log2(hosts))
    return (rounds + 2 * more) * (link.latency_s + link.message_s) + (rounds + more) * link.byte_s * nbytes


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


ALGORITHMS: dict[str, Callable[[Link, int, float], float]] = {
    "doubling": doubling_s,
    "halving": halving_s,
    "pieces": pieces_s,
}


def cheapest(link: Link, hosts: int, nbytes: float) -> str:
    """The algorithm that the model says is done first; "pieces" for one host."""
    return "pieces" if hosts < 2 else min(ALGORITHMS, key=lambda name: ALGORITHMS[name](link, hosts, nbytes))


@dataclass(frozen=True)
class Measured:
    """What was measured between hosts, the same numbers on all ranks.

    carrier: (bytes, seconds) of the allreduce of MPI or Gloo itself, bytes rising.
    """

    hosts: int
    link: Link
    carrier: tuple[tuple[int, float], ...]

    def seconds(self, algorithm: str, nbytes: float) -> float:
        """What an allreduce of `nbytes` bytes takes: the library's as measured, the others' by the model."""
        if algorithm == "library":
            return _interpolate(self.carrier, nbytes)
        return ALGORITHMS[algorithm](self.link, self.hosts, nbytes)

    def fastest(self, nbytes: float, among: Sequence[str]) -> str:
        """Which of these algorithms takes least; the first one of those that take the same."""
        return min(among, key=lambda name: self.seconds(name, nbytes))

    def table(self, among: Sequence[str]) -> list[tuple[int, str]]:
        """The fastest by size, as (from so many bytes on, algorithm): sizes rising, looked at from 1 KiB to 64 MiB."""
        found: list[tuple[int, str]] = []
        for size in [0, *(1 << bit for bit in range(10, 27))]:
            name = self.fastest(size, among)
            if not found or found[-1][1] != name:
                found.append((size, name))
        return found


def _interpolate(points: Sequence[tuple[int, float]], nbytes: float) -> float:
    """On straight lines through the points; beyond them on the first and the last line."""
    if len(points) == 1:
        return points[0][1]
    at = next((at for at, (size, _) in enumerate(points[1:-1], 1) if nbytes < size), len(points) - 1)
    (size, seconds), (larger, more) = points[at - 1 : at + 1]
    return max(0.0, seconds + (more - seconds) * (nbytes - size) / (larger - size))
