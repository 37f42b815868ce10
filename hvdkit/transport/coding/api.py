"""The interface of gradient compression between hosts with error feedback.

The user chooses a coding. Each bucket opens a coder of it, which keeps the residual, the part of the gradient that it
has not sent, and adds it to the next gradient. Without the residual training would not converge to the right result:
Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buffer import Buffer


class Matrix(NamedTuple):
    """A tensor of a bucket as a matrix, row by row. start: index of its first element in the bucket."""

    start: int
    rows: int
    columns: int


class Coder(Protocol):
    """Codes a shard of one bucket, of a fixed length, on one rank.

    count: number of elements, from the first on, that are coded; the elements after them are summed exactly.
    sent_bytes: bytes that this rank sends over the network in a round.
    """

    count: int
    sent_bytes: int

    def steps(self, wire: Wire, source: Buffer, out: Buffer) -> Iterator[bool]:
        """Reduce `source` into `out` (n,) over the ranks of the wire, as steps of SteppedBuckets.

        source: (n,); may be `out`. All ranks get the same bits.
        """


@runtime_checkable
class Coding(Protocol):
    """Describes how numbers are coded. It is equal on all ranks, and hashable, because the agreed plan contains it.

    of_matrices: the coding needs whole tensors, each as a matrix, so buckets and shards are cut between tensors.
    """

    @property
    def of_matrices(self) -> bool: ...

    def codes(self, shape: Sequence[int]) -> bool:
        """Return whether tensors of this shape are coded; others are sent unchanged, in an uncoded bucket."""

    def open(self, count: int, exact: int, dtype: str, matrices: Sequence[Matrix] = ()) -> Coder:
        """Open a coder.

        count: number of elements to code.
        exact: number of elements after them to send unchanged.
        dtype: "float32" or "float64".
        matrices: the matrices among the coded elements, if `of_matrices`; elements between them are not sent.
        """
