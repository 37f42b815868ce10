"""Numbers sent between hosts as less than themselves, with what was left out kept for the next time (error feedback).

A coding is what a user asks for. Each bucket opens a coder of it, which remembers what it has not sent yet: what is too
small today adds up until it is large enough. Without that memory training would not arrive where it should: Karimireddy
et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buffer import Buffer


class Matrix(NamedTuple):
    """A tensor of a bucket as a matrix, row by row; start: the element of the bucket that is its first."""

    start: int
    rows: int
    columns: int


class Coder(Protocol):
    """The coding of one piece of one bucket, of a fixed length, on one rank.

    count: how many numbers, from the first on, are coded; those after them are summed exactly.
    sent_bytes: how many this rank gives to the network in a round.
    """

    count: int
    sent_bytes: int

    def steps(self, wire: Wire, source: Buffer, out: Buffer) -> Iterator[bool]:
        """Reduce `source` into `out` (n,) over the ranks of the wire, as steps of SteppedBuckets.

        source: may be `out`. All ranks get the same bits.
        """


@runtime_checkable
class Coding(Protocol):
    """How numbers are coded. Equal on all ranks, and hashable: a part of the plan that ranks agree on.

    of_matrices: needs whole tensors, each seen as a matrix, so buckets and shards are cut between tensors.
    """

    @property
    def of_matrices(self) -> bool: ...

    def codes(self, shape: Sequence[int]) -> bool:
        """Is a tensor of this shape coded? Else it is sent as it is, in an uncoded bucket."""

    def open(self, count: int, exact: int, dtype: str, matrices: Sequence[Matrix] = ()) -> Coder:
        """The coder of `count` numbers, float32 or float64, followed by `exact` ones to be sent as they are.

        matrices: among the `count` numbers, where `of_matrices`; what lies between them is not sent.
        """
