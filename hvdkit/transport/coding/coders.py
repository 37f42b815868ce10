"""Opens the coder of a shard, sums a shard uncoded, and has the base class of coders whose messages are gathered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import TransportError
from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.between.collectives import reduce_steps, until_done
from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import STORAGE, Array, Buffer
from hvdkit.transport.coding.api import Coder

Bytes = NDArray[np.uint8]


def open_coder(spec: BucketSpec, own: tuple[int, int]) -> Coder | None:
    """Open the coder of the elements from own[0] up to own[1] of a bucket; None if they are not coded."""
    if isinstance(spec.wire, str):
        return None
    coded = min(spec.count - spec.exact, own[1]) - own[0]
    if coded <= 0:
        return None
    matrices = [one._replace(start=one.start - own[0]) for one in spec.matrices if own[0] <= one.start < own[1]]
    return spec.wire.open(coded, own[1] - own[0] - coded, spec.dtype, matrices)


def sent_bytes(spec: BucketSpec, coder: Coder | None, numbers: Buffer) -> int:
    """Return the bytes that a rank sends over the network for its numbers of a bucket, whatever the algorithm."""
    if coder is not None:
        return coder.sent_bytes
    return numbers.count * STORAGE[spec.wire_dtype].itemsize


def all_finite(values: Array) -> bool:
    """Return whether no value is inf or NaN. The sum is then finite unless it overflows."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def uncoded_steps(wire: Wire, source: Buffer, out: Buffer) -> Iterator[bool]:
    """Sum `source` into `out` (n,) over the ranks, as Coder.steps does, without coding."""
    np.copyto(out.array, source.array)
    spec = BucketSpec(out.dtype, out.count)
    return reduce_steps(wire, out, out, spec, arithmetic=NumpyArithmetic(), at_once=False)


class GatheredCoding:
    """The base class of codings that code each number by itself: see Coding."""

    of_matrices: ClassVar[bool] = False

    def codes(self, shape: Sequence[int]) -> bool:
        return True


class GatheredCoder(ABC):
    """See Coder. For messages that cannot be added up in transit: every rank gathers and decodes all messages.

    A coding implements `encode` and `add`; all messages of a coder have `message_bytes` bytes.
    After the message come the exact numbers, and a byte that is 1 if the message is of finite numbers. All ranks gather
    these bytes with the messages. If one byte is 0, all ranks sum their numbers uncoded, so no later bucket may
    overtake this one.
    """

    def __init__(self, count: int, exact: int, dtype: str, message_bytes: int) -> None:
        self.count = count
        self._dtype: np.dtype[Any] = STORAGE[dtype]
        self._message = message_bytes
        self.sent_bytes = message_bytes + exact * self._dtype.itemsize + 1
        self._unsent = np.zeros(count, self._dtype)

    @abstractmethod
    def encode(self, values: Array) -> Bytes:
        """Return the message, (message_bytes,), for values (count,)."""

    @abstractmethod
    def add(self, total: Array, message: Bytes, sign: int) -> None:
        """Add sign * the decoded message to total (count,)."""

    def steps(self, wire: Wire, source: Buffer, out: Buffer) -> Iterator[bool]:
        size, nbytes = wire.size, self.sent_bytes
        if size * nbytes > wire.largest_count:
            raise TransportError(
                f"The compressed messages of {size} hosts for one bucket have {size * nbytes} bytes, but one "
                f"collective can transfer at most {wire.largest_count}. Set HVDKIT_FUSION_BYTES to a smaller value."
            )
        with np.errstate(all="ignore"):
            unsent = source.array[: self.count] + self._unsent
            message = self.encode(unsent)
            self.add(unsent, message, -1)
        gathered = np.empty(size * nbytes, np.uint8)
        mine = gathered[wire.rank * nbytes :][:nbytes]
        mine[: self._message] = message
        mine[self._message : -1] = np.ascontiguousarray(source.array[self.count :]).view(np.uint8)
        mine[-1] = all_finite(unsent)
        yield from until_done(wire.allgather(Buffer(gathered, "uint8"), [nbytes] * size), free=False)
        if not gathered[nbytes - 1 :: nbytes].all():
            yield from uncoded_steps(wire, source, out)
            return
        self._unsent = unsent
        out.array[:] = 0
        for at in range(0, size * nbytes, nbytes):
            self.add(out.array[: self.count], gathered[at : at + self._message], 1)
            # A copy, because numbers after a message of any length may not be aligned.
            out.array[self.count :] += gathered[at + self._message : at + nbytes - 1].copy().view(self._dtype)
