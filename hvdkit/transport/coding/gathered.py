"""Codings whose messages cannot be added up on the way: every rank gets all of them, and adds what they stand for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import TransportError
from hvdkit.transport.between.collectives import until_done
from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buffer import STORAGE, Array, Buffer
from hvdkit.transport.coding.coders import all_finite, uncoded_steps

Bytes = NDArray[np.uint8]


class GatheredCoder(ABC):
    """See Coder. A coding writes `encode` and `add`; all messages of a coder are of `message_bytes`.

    Behind the message are the exact numbers, and a byte that is 1 where the message is of finite numbers. All ranks
    gather these bytes with the messages. If one is 0 they sum their numbers uncoded, so no later bucket may go before
    that.
    """

    def __init__(self, count: int, exact: int, dtype: str, message_bytes: int) -> None:
        self.count = count
        self._dtype: np.dtype[Any] = STORAGE[dtype]
        self._message = message_bytes
        self.sent_bytes = message_bytes + exact * self._dtype.itemsize + 1
        self._unsent = np.zeros(count, self._dtype)

    @abstractmethod
    def encode(self, values: Array) -> Bytes:
        """The message, (message_bytes,), for values (count,)."""

    @abstractmethod
    def add(self, total: Array, message: Bytes, sign: int) -> None:
        """total (count,) += sign * what the message stands for."""

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
            # A copy, since numbers behind a message of any length do not begin where numbers may.
            out.array[self.count :] += gathered[at + self._message : at + nbytes - 1].copy().view(self._dtype)
