"""Opening a coder for a piece of a bucket, and sending a piece uncoded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.between.collectives import reduce_steps
from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import STORAGE, Array, Buffer
from hvdkit.transport.coding.api import Coder


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
    return numbers.count * STORAGE[spec.wire_dtype].itemsize


def all_finite(values: Array) -> bool:
    """Is no value inf or NaN? Their sum is finite then, but where that is too large itself."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def uncoded_steps(wire: Wire, source: Buffer, out: Buffer) -> Iterator[bool]:
    """Sum `source` into `out` (n,) over the ranks, as Coder.steps does, with no number coded."""
    np.copyto(out.array, source.array)
    spec = BucketSpec(out.dtype, out.count)
    return reduce_steps(wire, out, out, spec, arithmetic=NumpyArithmetic(), at_once=False)
