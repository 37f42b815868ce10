"""A reducer on three ranks, without engine and framework: right sums under all settings and orders of arrival."""

from __future__ import annotations

import random
from collections.abc import Collection

import numpy as np
import pytest
from pipe_ranks import PipeTransport, run_piped

from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.engine.planned.reducer import BucketReducer, Context, Statistics
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.engine.planned.source import Filled
from hvdkit.engine.request import ReduceOptions
from hvdkit.transport.buffer import Array, Buffer
from hvdkit.transport.shared.transport import SharedMemoryTransport

COUNTS = (3, 700, 0, 5000, 64, 1, 2000)
SIZE = 3
SETTINGS = [
    PlanSettings(4096, 2),
    PlanSettings(1024, 1, chunk_bytes=256),
    PlanSettings(0, 3),
    PlanSettings(2**20, 4, progress="thread"),
]


class Source:
    """Arrays of which a rank has some: `values`, by tensor; `results` are theirs, and those that other ranks have."""

    def __init__(self) -> None:
        self.values: dict[int, Array] = {}
        self.results: dict[int, Array] = {}
        self.globally_unused: set[int] = set()
        self.plans: list[Plan] = []

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> Filled:
        """See TensorSource.fill."""
        memory.array[:] = np.nan  # of padding nothing may be seen
        unused = set()
        for slot in self.plans[-1].buckets[bucket].slots:
            values = self.values.get(slot.tensor)
            if values is None:
                unused.add(slot.tensor)
                memory.array[slot.start : slot.stop] = 0
            else:
                memory.array[slot.start : slot.stop] = values[slot.offset : slot.offset + slot.stop - slot.start]
        return Filled(frozenset(unused))

    def drain(self, bucket: int, memory: Buffer, globally_unused: Collection[int]) -> None:
        """See TensorSource.drain."""
        self.globally_unused.update(globally_unused)
        for slot in self.plans[-1].buckets[bucket].slots:
            if slot.tensor not in globally_unused:
                result = self.results.setdefault(slot.tensor, np.full(COUNTS[slot.tensor], np.nan, np.float32))
                result[slot.offset : slot.offset + slot.stop - slot.start] = memory.array[slot.start : slot.stop]

    def on_plan(self, plan: Plan) -> None:
        """See TensorSource.on_plan."""
        self.plans.append(plan)


def uses(rank: int, turn: int, tensor: int) -> bool:
    """Tensor 1 is used by rank 1 only, tensor 4 by none, 5 in every other round; all others by all."""
    return {1: rank == 1, 4: False, 5: turn % 2 == 0}.get(tensor, True)


def value(rank: int, turn: int, tensor: int) -> Array:
    """What a rank has of a tensor: small integers, whose sums are exact."""
    return (np.arange(COUNTS[tensor]) % 7 + 10 * rank + turn).astype(np.float32)


def reduce_under_all_settings(group: PipeTransport, directory: str) -> list[str]:
    """Two rounds under each of the settings, replanned in between; what was wrong."""
    source, statistics = Source(), Statistics()
    reducer = BucketReducer(
        Context(SharedMemoryTransport(group, group, host="here", directory=directory)),
        [TensorSpec(f"t{at}", count, "float32") for at, count in enumerate(COUNTS)],
        source,
        options=ReduceOptions(average=False),
        settings=SETTINGS[0],
        statistics=statistics,
    )
    dice, wrong = random.Random(group.rank), []
    for turn in range(2 * len(SETTINGS)):
        if turn and turn % 2 == 0:
            reducer.replan(SETTINGS[turn // 2])
        source.values = {at: value(group.rank, turn, at) for at in range(len(COUNTS)) if uses(group.rank, turn, at)}
        source.results.clear()
        source.globally_unused.clear()
        for tensor in dice.sample(sorted(source.values), len(source.values)):
            reducer.arrived(tensor)
        reducer.finish()
        for tensor in range(len(COUNTS)):
            parts = [value(rank, turn, tensor) for rank in range(SIZE) if uses(rank, turn, tensor)]
            if not parts and (tensor not in source.globally_unused or tensor in source.results):
                wrong.append(f"round {turn}: tensor {tensor} is used by nobody, and that is not seen")
            elif parts and not np.array_equal(source.results[tensor], sum(parts)):
                wrong.append(f"round {turn}: tensor {tensor} is {source.results[tensor]}")
    source.values = {at: value(group.rank, 0, at) for at in range(len(COUNTS))}
    reducer.arrived(0)
    reducer.forget_arrivals()
    for tensor in range(1, len(COUNTS)):
        reducer.arrived(tensor)
    early = reducer.started(0)
    reducer.arrived(0)
    if early or not reducer.started(0):
        wrong.append("an arrival that was forgotten counted")
    reducer.finish()
    if statistics.generations != 2 * len(SETTINGS) + 1 or len(source.plans) != len(SETTINGS):
        wrong.append(f"{statistics}, {len(source.plans)} plans")
    reducer.close()
    return wrong


@pytest.mark.ranks
def test_sums_are_right_under_all_settings_and_arrivals(tmp_path: object) -> None:
    assert run_piped(SIZE, reduce_under_all_settings, str(tmp_path)) == [[]] * SIZE
