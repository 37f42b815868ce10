"""How sums cross between the hosts of a group: what is asked for, what was measured, and what follows from both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvdkit.errors import TransportError
from hvdkit.transport.base import HALF, BucketSpec
from hvdkit.transport.cost import ALGORITHMS, MESSAGE_BYTES, Measured

#: What can be asked for. "library": the allreduce of MPI or Gloo itself.
NAMES = ("auto", "library", *ALGORITHMS)


class BetweenHosts:
    """The algorithm for each sum between the hosts of a group; alike on all its ranks.

    algorithm: one of NAMES; "auto" takes what `measured` says is fastest. It may be set at any time at which no bucket
    is under way, by all ranks alike. able: the algorithms that the carrier has. measured: None until it has been.
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

    def pick(self, dtype: str, nbytes: int) -> str:
        """The algorithm for a sum of so many bytes on the wire."""
        fitting = self.fitting(dtype)
        if self.algorithm in fitting:
            return self.algorithm
        if self.measured is None or self.algorithm != "auto":
            return "pieces"
        return self.measured.fastest(nbytes, fitting)

    def check(self, specs: Iterable[BucketSpec]) -> None:
        """Raise TransportError if the algorithm asked for cannot reduce these buckets."""
        wish = self.algorithm
        if wish == "auto":
            return
        if wish not in self.able:
            raise TransportError(
                f"HVDKIT_ALGORITHM={wish} needs messages between two ranks, which Gloo does not have; here there are "
                f"{', '.join(self.able)}. Leave it out, or start the ranks with hvdrun, and MPI."
            )
        for dtype in {spec.travels_as for spec in specs if isinstance(spec.wire, str)}:
            if wish not in self.fitting(dtype):
                raise TransportError(
                    f"HVDKIT_ALGORITHM={wish} would round sums of {dtype} on the way between {self.hosts} hosts. Set "
                    f"{' or '.join(self.fitting(dtype))}, leave it out, or train without compression."
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
