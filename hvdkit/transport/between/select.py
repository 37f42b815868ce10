"""The choice of an algorithm between the hosts of a group, by the setting and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvdkit.errors import TransportError
from hvdkit.transport.between.cost import ALGORITHMS, MESSAGE_BYTES, Measured
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import HALF

_WORTH_TRYING = 1.5  # times the fastest, by the model

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
