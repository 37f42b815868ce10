"""Chooses the algorithm between the hosts of a group, by the setting or by a model with a few measured numbers.

The algorithms and their costs are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), plus the cost for a rank of each of several messages in flight.

By this model one algorithm alone would take x1.0 to x1.1 of the fastest of the three on 2 to 16 hosts of Ethernet,
x2.1 at 100 Gbit/s on 32 to 64 hosts, x1.5 there for sums from 1 MiB on (`python -m benchmarks.algorithms`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2

from hvdkit.errors import TransportError
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import HALF

#: Sizes of messages to choose from; every known MPI sends the smallest without a handshake (eagerly).
MESSAGE_BYTES = (60_000, 240_000, 960_000, 3_840_000)
_MESSAGE_SHARE = 0.1  # largest share of the fixed cost of a message in its time
_WORTH_TRYING = 1.5  # times the fastest algorithm's time, by the model


@dataclass(frozen=True)
class Link:
    """The measured link between any two hosts.

    latency_s: seconds until an empty message arrives. byte_s: seconds for each byte of one direction. message_s:
    seconds that each message costs a rank, however many are in flight.
    """

    latency_s: float
    byte_s: float
    message_s: float = 0.0

    @property
    def message_bytes(self) -> int:
        """Return the best size of messages: the smallest of MESSAGE_BYTES whose bytes take ten times `message_s`.

        Small messages fill the pipeline sooner; on a fast link the number of messages matters.
        """
        worth = self.message_s / _MESSAGE_SHARE
        return next((size for size in MESSAGE_BYTES if size * self.byte_s >= worth), MESSAGE_BYTES[-1])


def doubling_s(link: Link, hosts: int, nbytes: float) -> float:
    """Return the seconds of recursive doubling; hosts beyond a power of two send first and receive at the end.

    In the pipeline those two messages go in opposite directions at the same time.
    """
    more = 0 if hosts & (hosts - 1) == 0 else 1
    rounds = int(log2(hosts))
    return (rounds + 2 * more) * (link.latency_s + link.message_s) + (rounds + more) * link.byte_s * nbytes


def halving_s(link: Link, hosts: int, nbytes: float) -> float:
    """Return the seconds of recursive halving and doubling (Rabenseifner)."""
    whole = hosts & (hosts - 1) == 0
    within = 1 << int(log2(hosts))
    seconds = 2 * int(log2(hosts)) * (link.latency_s + link.message_s)
    seconds += 2 * link.byte_s * nbytes * (within - 1) / within
    return seconds if whole else seconds + 2 * (link.latency_s + link.message_s + link.byte_s * nbytes)


def pieces_s(link: Link, hosts: int, nbytes: float) -> float:
    """Return the seconds of sending each rank its slice directly, and the sums directly back."""
    others = hosts - 1
    return 2 * (link.latency_s + others * link.message_s + link.byte_s * nbytes * others / hosts)


ALGORITHMS: dict[str, Callable[[Link, int, float], float]] = {
    "doubling": doubling_s,
    "halving": halving_s,
    "pieces": pieces_s,
}


def cheapest(link: Link, hosts: int, nbytes: float) -> str:
    """Return the fastest algorithm by the model; "pieces" for one host."""
    return "pieces" if hosts < 2 else min(ALGORITHMS, key=lambda name: ALGORITHMS[name](link, hosts, nbytes))


@dataclass(frozen=True)
class Measured:
    """The measurements between hosts, the same numbers on all ranks.

    carrier: (bytes, seconds) of the allreduce of MPI or Gloo itself, in rising order of bytes.
    """

    hosts: int
    link: Link
    library_samples: tuple[tuple[int, float], ...]

    def seconds(self, algorithm: str, nbytes: float) -> float:
        """Return the seconds of an allreduce of `nbytes` bytes: the library's as measured, others by the model."""
        if algorithm == "library":
            return self._library_s(nbytes)
        return ALGORITHMS[algorithm](self.link, self.hosts, nbytes)

    def _library_s(self, nbytes: float) -> float:
        """Interpolate the library's time; beyond the last point at the speed from first to last, at most the link's."""
        first, last = self.library_samples[0], self.library_samples[-1]
        if nbytes <= last[0] and len(self.library_samples) > 1:
            return _interpolate(self.library_samples, nbytes)
        byte_s = 2 * self.link.byte_s * (self.hosts - 1) / self.hosts
        if last != first:  # not the last two points: a handshake or other work on a host may affect their difference
            byte_s = max(byte_s, (last[1] - first[1]) / (last[0] - first[0]))
        return last[1] + byte_s * max(0.0, nbytes - last[0])

    def fastest(self, nbytes: float, among: Sequence[str]) -> str:
        """Return the fastest of these algorithms; the first of several with the same time."""
        return min(among, key=lambda name: self.seconds(name, nbytes))

    def table(self, among: Sequence[str]) -> list[tuple[int, str]]:
        """Return the fastest algorithm by size, as (smallest bytes, algorithm), for sizes from 1 KiB to 64 MiB."""
        found: list[tuple[int, str]] = []
        for size in [0, *(1 << bit for bit in range(10, 27))]:
            name = self.fastest(size, among)
            if not found or found[-1][1] != name:
                found.append((size, name))
        return found


def _interpolate(points: Sequence[tuple[int, float]], nbytes: float) -> float:
    """Interpolate linearly between two or more points, up to the last; before the first on the first line."""
    at = next((at for at, (size, _) in enumerate(points[1:-1], 1) if nbytes < size), len(points) - 1)
    (size, seconds), (larger, more) = points[at - 1 : at + 1]
    return max(0.0, seconds + (more - seconds) * (nbytes - size) / (larger - size))


#: The values of the setting `algorithm`. "library": the allreduce of MPI or Gloo itself.
NAMES = ("auto", "library", *ALGORITHMS)


class BetweenHosts:
    """Chooses the algorithm for each sum between the hosts of a group; the same on all ranks.

    algorithm: one of NAMES; "auto" takes the fastest according to `measured`. All ranks may set it, to the same value,
    while no bucket is in progress.
    able: the algorithms that the backend has.
    hosts: number of hosts.
    measured: the measurements; None before them.
    """

    def __init__(self, algorithm: str, able: Sequence[str], hosts: int) -> None:
        self.algorithm, self.able, self.hosts = algorithm, tuple(able), hosts
        self.measured: Measured | None = None

    @property
    def message_bytes(self) -> int:
        """Return the bytes of the largest message."""
        return MESSAGE_BYTES[0] if self.measured is None else self.measured.link.message_bytes

    def supported_for(self, dtype: str) -> list[str]:
        """Return the algorithms for numbers with this wire dtype.

        Partial sums of 16-bit floats would be rounded on each hop, so only algorithms that add all ranks' numbers at
        once fit them.
        """
        if dtype not in HALF:
            return list(self.able)
        return [name for name in self.able if name in ("pieces", "library") or (name == "doubling" and self.hosts == 2)]

    def pick(self, dtype: str, nbytes: int, wish: str = "auto") -> str:
        """Return the algorithm for a sum of `nbytes` bytes on the wire. wish: for this sum; overrides `algorithm`."""
        supported = self.supported_for(dtype)
        for preferred in (wish, self.algorithm):
            if preferred in supported:
                return preferred
        if self.measured is None or self.algorithm != "auto":
            return "pieces"
        return self.measured.fastest(nbytes, supported)

    def find_candidates(self, dtypes: Iterable[str], nbytes: int) -> list[str]:
        """Return the algorithms, with "auto", that may be fastest for sums of about `nbytes` in these wire dtypes."""
        among = [name for name in self.able if all(name in self.supported_for(dtype) for dtype in dtypes)]
        if self.hosts < 2 or self.measured is None or not among:
            return ["auto"]
        least = self.measured.seconds(self.measured.fastest(nbytes, among), nbytes)
        return ["auto", *(name for name in among if self.measured.seconds(name, nbytes) <= _WORTH_TRYING * least)]

    def check(self, specs: Sequence[BucketSpec]) -> None:
        """Raise TransportError if these buckets cannot be reduced, or not by the requested algorithm."""
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
            if wish not in self.supported_for(dtype):
                raise TransportError(
                    f"HVDKIT_ALGORITHM={wish} would round partial sums to {dtype} between {self.hosts} hosts. Set "
                    f"HVDKIT_ALGORITHM to {' or '.join(self.supported_for(dtype))}, leave it out, or train without "
                    "compression."
                )

    def describe(self) -> str:
        """Describe in one line the link, and the algorithm for each range of sizes."""
        if self.measured is None:
            return "" if self.algorithm == "auto" else f"{self.algorithm} between hosts"
        link = self.measured.link
        rate = 8e-6 / link.byte_s if link.byte_s else 0.0
        speed = f"{rate:.0f} Mbit/s and {1e6 * link.latency_s:.0f} us between hosts"
        if self.algorithm != "auto":
            return f"{speed}, {self.algorithm}"
        table = self.measured.table(self.supported_for("float32"))
        ranges = [name if not size else f"{name} from {_in_words(size)} on" for size, name in table]
        return f"{speed}, {', '.join(ranges)}"


def _in_words(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
