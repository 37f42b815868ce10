"""Numbers sent between hosts as less than themselves, with what was left out kept for the next time (error feedback).

A coding is what a user asks for. Each bucket opens a coder of it, which remembers what it has not sent yet: what is too
small today adds up until it is large enough. Without that memory training would not arrive where it should: Karimireddy
et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.base import STORAGE, Array, BucketSpec, Buffer, Matrix
from hvdkit.transport.steps import reduce_steps
from hvdkit.transport.wire import Wire


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
    def of_matrices(self) -> bool: ...  # noqa: D102

    def codes(self, shape: Sequence[int]) -> bool:
        """Is a tensor of this shape coded? Else it is sent as it is, in an uncoded bucket."""

    def open(self, count: int, exact: int, dtype: str, matrices: Sequence[Matrix] = ()) -> Coder:
        """The coder of `count` numbers, float32 or float64, followed by `exact` ones to be sent as they are.

        matrices: among the `count` numbers, where `of_matrices`; what lies between them is not sent.
        """


def open_coder(spec: BucketSpec, own: tuple[int, int]) -> Coder | None:
    """The coder of the elements from own[0] up to own[1] of a bucket; None where they are not coded."""
    if isinstance(spec.wire, str):
        return None
    coded = min(spec.count - spec.exact, own[1]) - own[0]
    if coded <= 0:
        return None
    matrices = [one._replace(start=one.start - own[0]) for one in spec.matrices if own[0] <= one.start < own[1]]
    return spec.wire.open(coded, own[1] - own[0] - coded, spec.dtype, matrices)


def sent_bytes(spec: BucketSpec, coder: Coder | None, numbers: Buffer) -> int:
    """How many bytes a rank gives to the network for its numbers of a bucket, whatever becomes of them there."""
    if coder is not None:
        return coder.sent_bytes
    return numbers.count * STORAGE[spec.dtype if spec.narrow == "none" else spec.narrow].itemsize


def all_finite(values: Array) -> bool:
    """Is no value inf or NaN? Their sum is finite then, but where that is too large itself."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def uncoded_steps(wire: Wire, source: Buffer, out: Buffer) -> Iterator[bool]:
    """Sum `source` into `out` (n,) over the ranks, as Coder.steps does, with no number coded."""
    np.copyto(out.array, source.array)
    spec = BucketSpec(out.dtype, out.count)
    return reduce_steps(wire, out, out, spec, arithmetic=NumpyArithmetic(), at_once=False)
