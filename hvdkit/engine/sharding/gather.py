"""All-gather of parameters, after each rank has updated its own shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from hvdkit.engine.compression import Wire
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.agreement import check_tensors
from hvdkit.engine.planned.plan import Plan, plan_buckets
from hvdkit.engine.sharding.bucket_memory import BucketMemory, may_be_in_place
from hvdkit.engine.sharding.tensor_ranges import TensorRange, cut_pieces, split_plan
from hvdkit.engine.strategy import Parameters
from hvdkit.errors import HorovodInternalError, RankLostError


class ParameterGather:
    """All-gathers the parameters of one optimizer, bucket by bucket.

    Opened, and closed, by all ranks together.

    parameters: of the optimizer.
    group: the ranks that train together.
    memory: device and settings of the buckets.
    wires: the gradients' wires, if buckets must be cut like the gradients' buckets.
    in_place: May the values have in-place segments?
    Raises PlanMismatchError if the ranks' parameters differ.

    The attribute `pieces` describes what this rank keeps: its shards of the buckets.
    """

    def __init__(
        self,
        parameters: Parameters,
        group: Group,
        memory: BucketMemory,
        wires: Sequence[Wire] | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        settings, tensors = memory.settings, parameters.tensors
        check_tensors(group.transport, tensors, "sharded", settings.fusion_bytes)
        self._plan = plan = Plan(tuple(tensors), plan_buckets(tensors, settings.fusion_bytes, wires))
        specs = plan.specs((1.0, 1.0), settings.chunk_bytes, settings.algorithm)
        specs = [replace(spec, wire="none") for spec in specs]  # parameters are sent uncompressed
        self._buckets = memory.open_buckets(specs, settings.buckets_in_flight)
        shards = self._buckets.shard
        in_place = in_place and may_be_in_place(group)
        self._owned = self._buckets.owned if in_place else [(0, 0)] * len(shards)
        self.pieces: list[TensorRange] = cut_pieces(plan, shards)
        self._values = parameters.values
        self._values.on_plan(split_plan(plan, shards))
        self._data = [
            whole.slice(0, bucket.data_count) for whole, bucket in zip(self._buckets.memory, plan.buckets, strict=True)
        ]
        group.engine.joining.plans[f"{parameters.name}.shards"] = self

    def gather(self) -> None:
        """Send this rank's shards of the parameters to all ranks, and receive theirs; collective.

        Raises RankLostError, with the parameters concerned, if a rank has ended.
        """
        depth, count = self._buckets.depth, len(self._data)
        for index in range(count):
            if index >= depth:
                self._receive(index - depth)
            filled = self._values.fill(index, self._data[index], self._owned[index])
            self._buckets.all_gather(index, filled.in_place)
        for index in range(max(0, count - depth), count):
            self._receive(index)

    def _receive(self, index: int) -> None:
        try:
            self._buckets.wait(index)
        except RankLostError as error:
            raise RankLostError(f"{error} The parameters {self._plan.name(index)} were being gathered.") from None
        self._values.drain(len(self._data) + index, self._data[index], ())

    @property
    def next_wait(self) -> str:
        """See JoinedPlan. Waits for parameters are not reported."""
        return ""

    def join_rounds(self) -> NoReturn:
        """Raise HorovodInternalError, because a joined rank would have to go on updating its shard."""
        raise HorovodInternalError(
            "join() cannot be used with an optimizer that has shard=..., since this rank alone can update its shard. "
            "Give all ranks equally many batches (hvd.data.ShardedSampler does), or leave out shard."
        )

    def end_zero_rounds(self) -> None:
        """See join_rounds()."""

    def close(self) -> None:
        """Free the buckets; collective."""
        self._data = []
        self._values.on_plan(Plan((), ()))
        self._buckets.close()
