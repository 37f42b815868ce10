"""Steps of two ranks in one process, in turn, for valgrind to count the instructions of.

    valgrind --tool=cachegrind --cache-sim=no python tests/support/step_instructions.py 20

A step is a round of a plan: all tensors arrive, are filled in, reduced and taken back, by both ranks one after the
other, so that nobody waits and every run is like the last one.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

import numpy as np
from pipe_ranks import PipeTransport

from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.engine.planned.reducer import BucketReducer, Context, Statistics
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.engine.planned.source import Filled
from hvdkit.engine.request import ReduceOptions
from hvdkit.transport.buckets import InPlaceSegment
from hvdkit.transport.buffer import Array, Buffer
from hvdkit.transport.shared.transport import SharedMemoryTransport

COUNTS = [64] * 100 + [16384] * 2  # many small ones, as Python's part grows with their number


class Gradients:
    """Gradients (see planned/source.py) that are copied all at once, as this is about what the engine does."""

    def __init__(self) -> None:
        self._data: dict[int, Array] = {}
        self._own: dict[int, tuple[int, int]] = {}

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> Filled:
        """See TensorSource.fill. What is this rank's own stays where it is."""
        data = self._data.get(bucket)
        if data is None:
            data = self._data[bucket] = np.ones(memory.count, np.float32)
        self._own[bucket] = start, stop = owned
        memory.array[:start] = data[:start]
        memory.array[stop:] = data[stop:]
        mine = Buffer(data[start:stop], memory.dtype)
        return Filled(frozenset(), [InPlaceSegment(start, mine, mine)])

    def drain(self, bucket: int, memory: Buffer, globally_unused: Collection[int]) -> None:
        """See TensorSource.drain."""
        data, (start, stop) = self._data[bucket], self._own[bucket]
        data[:start] = memory.array[:start]
        data[stop:] = memory.array[stop:]

    def on_plan(self, plan: Plan) -> None:
        """See TensorSource.on_plan. What is filled depends on no plan."""


def open_plan(transport: PipeTransport) -> BucketReducer:
    """One rank's plan; the other opens its own meanwhile."""
    return BucketReducer(
        Context(SharedMemoryTransport(transport, transport, host="here")),
        [TensorSpec(f"tensor {at}", count, "float32") for at, count in enumerate(COUNTS)],
        Gradients(),
        options=ReduceOptions(),
        settings=PlanSettings(64 * 1024, 4),
        statistics=Statistics(),
    )


def open_plans() -> list[BucketReducer]:
    """Both ranks' plans."""
    one, other = Pipe()
    transports = [PipeTransport(0, {1: one}), PipeTransport(1, {0: other})]
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(open_plan, transports))


def take_steps(plans: Sequence[BucketReducer], count: int) -> None:
    """So many rounds of both."""
    for _ in range(count):
        for tensor in reversed(range(len(COUNTS))):
            for plan in plans:
                plan.arrived(tensor)
        for plan in plans:
            plan.finish()


def main(count: int) -> None:
    """Take `count` steps, with nothing that differs from run to run."""
    gc.disable()
    take_steps(open_plans(), count)


if __name__ == "__main__":
    main(int(sys.argv[1]))
