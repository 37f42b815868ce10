"""The choice of an algorithm between the hosts of a group: by the setting, and a model in a few measured numbers.

The algorithms and their costs are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), with what a rank pays to have several messages under way added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2

from hvdkit.errors import TransportError
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import HALF

#: What is cut into messages of these sizes: the smallest goes without a handshake in every MPI that is known to us.
MESSAGE_BYTES = (60_000, 240_000, 960_000, 3_840_000)
_MESSAGE_SHARE = 0.1  # of a message's time may be what it costs to have a message at all
_WORTH_TRYING = 1.5  # times the fastest, by the model


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
            return self._library_s(nbytes)
        return ALGORITHMS[algorithm](self.link, self.hosts, nbytes)

    def _library_s(self, nbytes: float) -> float:
        """On straight lines through the points; beyond the last one as fast as from first to last, and as the link."""
        first, last = self.carrier[0], self.carrier[-1]
        if nbytes <= last[0] and len(self.carrier) > 1:
            return _interpolate(self.carrier, nbytes)
        byte_s = 2 * self.link.byte_s * (self.hosts - 1) / self.hosts
        if last != first:  # not by the last two, which a handshake or other work of a host may have set apart
            byte_s = max(byte_s, (last[1] - first[1]) / (last[0] - first[0]))
        return last[1] + byte_s * max(0.0, nbytes - last[0])

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
    """On straight lines through two or more points, up to the last one; before the first one on the first line."""
    at = next((at for at, (size, _) in enumerate(points[1:-1], 1) if nbytes < size), len(points) - 1)
    (size, seconds), (larger, more) = points[at - 1 : at + 1]
    return max(0.0, seconds + (more - seconds) * (nbytes - size) / (larger - size))


#: What can be asked for. "library": the allreduce of MPI or Gloo itself.
NAMES = ("auto", "library", *ALGORITHMS)


class BetweenHosts:
    """The algorithm for each sum between the hosts of a group; alike on all its ranks.

    algorithm: one of NAMES; "auto" takes what `measured` says is fastest. It may be set at any time at which no bucket
    is under way, by all ranks alike. able: the algorithms that the backend has. measured: None until it has been.
    """

    def __init__(self, algorithm: str, able: Sequence[str], hosts: int) -> None:
        self.algorithm, self.able, self.hosts = algorithm, tuple(able), hosts
        self.measured: Measured | None = None

    @property
    def message_bytes(self) -> int:
        """Of the largest message."""
        return MESSAGE_BYTES[0] if self.measured is None else self.measured.link.message_bytes

    def fitting(self, dtype: str) -> list[str]:
        """The algorithms for numbers that travel as `dtype`.

        Of 16 bits each partial sum would be rounded on its way: those are added where all of them have come together.
        """
        if dtype not in HALF:
            return list(self.able)
        return [name for name in self.able if name in ("pieces", "library") or (name == "doubling" and self.hosts == 2)]

    def pick(self, dtype: str, nbytes: int, wish: str = "auto") -> str:
        """The algorithm for a sum of so many bytes on the wire. wish: for this sum, before that for all."""
        fitting = self.fitting(dtype)
        for asked in (wish, self.algorithm):
            if asked in fitting:
                return asked
        if self.measured is None or self.algorithm != "auto":
            return "pieces"
        return self.measured.fastest(nbytes, fitting)

    def worth_trying(self, dtypes: Iterable[str], nbytes: int) -> list[str]:
        """What may be fastest for sums of about so many bytes, in these dtypes on the wire; "auto" among them."""
        among = [name for name in self.able if all(name in self.fitting(dtype) for dtype in dtypes)]
        if self.hosts < 2 or self.measured is None or not among:
            return ["auto"]
        least = self.measured.seconds(self.measured.fastest(nbytes, among), nbytes)
        return ["auto", *(name for name in among if self.measured.seconds(name, nbytes) <= _WORTH_TRYING * least)]

    def check(self, specs: Sequence[BucketSpec]) -> None:
        """Raise TransportError if these buckets cannot be reduced, or not by the algorithm asked for."""
        for spec in specs:
            if spec.narrow != "none" and spec.dtype not in (*HALF, "float32", "float64"):
                raise TransportError(
                    f"A {spec.dtype} bucket cannot be sent as {spec.narrow}. Use hvd.Compression.none for it."
                )
        wish = self.algorithm
        if wish == "auto":
            return
        if wish not in self.able:
            raise TransportError(
                f"HVDKIT_ALGORITHM={wish} needs messages between two ranks, which Gloo does not support; it supports "
                f"{', '.join(self.able)}. Leave HVDKIT_ALGORITHM out, or start the ranks with hvdrun, which uses MPI."
            )
        for dtype in {spec.wire_dtype for spec in specs if isinstance(spec.wire, str)}:
            if wish not in self.fitting(dtype):
                raise TransportError(
                    f"HVDKIT_ALGORITHM={wish} would round partial sums to {dtype} between {self.hosts} hosts. Set "
                    f"HVDKIT_ALGORITHM to {' or '.join(self.fitting(dtype))}, leave it out, or train without "
                    "compression."
                )

    def describe(self) -> str:
        """One line: the link, and what is taken for which sizes."""
        if self.measured is None:
            return "" if self.algorithm == "auto" else f"{self.algorithm} between hosts"
        link = self.measured.link
        rate = 8e-6 / link.byte_s if link.byte_s else 0.0
        speed = f"{rate:.0f} Mbit/s and {1e6 * link.latency_s:.0f} us between hosts"
        if self.algorithm != "auto":
            return f"{speed}, {self.algorithm}"
        table = self.measured.table(self.fitting("float32"))
        ranges = [name if not size else f"{name} from {_in_words(size)} on" for size, name in table]
        return f"{speed}, {', '.join(ranges)}"


def _in_words(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
