"""What is still under way when a wait is given up keeps its memory: MPI may still read and write it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from hvdkit.errors import TransportError
from hvdkit.transport.between.measure import measure
from hvdkit.transport.buffer import Buffer, Op
from hvdkit.transport.request import Request


class _Never(Request):
    """Another rank never comes. memory: what MPI holds meanwhile."""

    def __init__(self, out: Buffer) -> None:
        self.out = out

    def done(self) -> bool:
        return False


class _Wire:
    """Two ranks, of which the other one does nothing."""

    rank, size, messages = 0, 2, None

    def __init__(self) -> None:
        self.memory: list[weakref.ref[np.ndarray]] = []

    def allreduce(self, source: Buffer, out: Buffer, op: Op) -> Request:
        self.memory.append(weakref.ref(out.array))
        return _Never(out)


def test_a_measurement_that_is_given_up_keeps_its_memory() -> None:
    wire = _Wire()

    def check() -> None:
        raise TransportError("the other rank has ended")

    with pytest.raises(TransportError, match="the other rank has ended"):
        measure(wire, check)  # type: ignore[arg-type]
    gc.collect()
    assert wire.memory and all(memory() is not None for memory in wire.memory)
