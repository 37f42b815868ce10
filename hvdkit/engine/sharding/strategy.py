"""Sharded optimizers (ZeRO): each rank steps on its shards of the parameters, then all ranks get the new values.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, of which
these are stages 1 and 2.

shard="optimizer": each of n ranks keeps 1/n of the optimizer's state and updates that part of the parameters, all ranks
gather the result, and the gradients that a program can read are as without shard. shard="gradients": the same, but
gradients may be reduce-scattered and freed while backward runs, and a program cannot read them whole.

With "gradients" all adapters reduce-scatter. With "optimizer" the algorithm follows from the second half of its
sentence: an adapter for PyTorch reduces in backward(), after which a program reads whole averages, so every rank needs
them all (allreduce); an adapter for Keras reduces in apply(), after which no program reads gradients, so the shards are
enough (reduce-scatter). Measured on three ranks over TCP, AdamW, float32, bytes that a rank sends in a step for each
byte of gradients: without shard 1.34; PyTorch "optimizer" 2.00, "gradients" 1.34; Keras 1.34 with both, on each
backend. On two ranks of a host a step of AdamW takes x0.90 to x1.02 of one without shard ("optimizer"), x0.91 to x0.96
("gradients"; `hvdrun -np 2 python -m benchmarks.sharded_step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.engine.reduce_op import ReduceOp
from hvdkit.engine.sharding.bucket_memory import BucketMemory, memory_on_host
from hvdkit.engine.sharding.gather import ParameterGather
from hvdkit.engine.sharding.scatter import ScatterGradients
from hvdkit.engine.sharding.tensor_ranges import TensorRange
from hvdkit.engine.strategy import Parameters, Strategy, other_engine
from hvdkit.transport.api import Transport


class OptimizerShards(Protocol):
    """An adapter's division of the inner optimizer: it steps on pieces, and keeps their state."""

    def collect(self, transport: Transport) -> None:
        """Gather the divided state, because the parameters are divided again next; collective."""

    def divide(self, parameters: Parameters, pieces: Sequence[TensorRange], group: Group) -> None:
        """Keep the state of these pieces only. group: the ranks among which the parameters are divided."""

    def gathered(self) -> None:
        """Called when all parameters have been gathered."""


class ZeroStrategy(Strategy):
    """Lets every rank step on its own shards of the parameters, and gathers the parameters afterwards.

    gradients: reduces the gradients, whole (shard="optimizer") or in the same shards (ScatterGradients,
    shard="gradients"). shards: the adapter's division of the optimizer.
    """

    def __init__(self, gradients: AllReduce, shards: OptimizerShards) -> None:
        self.gradients, self._shards = gradients, shards
        self.repeatable = gradients.repeatable
        self._gather: ParameterGather | None = None

    @property
    def loss_op(self) -> ReduceOp:
        """See Strategy.loss_op."""
        return self.gradients.loss_op

    @property
    def statistics(self) -> Statistics:
        """See Strategy.statistics."""
        return self.gradients.statistics

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach."""
        if self._gather is not None:
            self._shards.collect(group.transport)
            self._close()
        memory, wires, in_place, pieces = self.find_memory(parameters, group), None, False, list[TensorRange]()
        if isinstance(self.gradients, ScatterGradients):
            self.gradients.attach(parameters, group, memory)
            wires = [self.gradients.options.wire_for_tensor(tensor) for tensor in parameters.tensors]
            in_place = self.gradients.in_place
        else:
            self.gradients.attach(parameters, group)
        if parameters.tensors:
            self._gather = ParameterGather(parameters, group, memory, wires, in_place=in_place)
            pieces = self._gather.pieces
        self._shards.divide(parameters, pieces, group)

    def find_memory(self, parameters: Parameters, group: Group) -> BucketMemory:
        """Select device and settings of the buckets; collective. Subclasses may override it."""
        return memory_on_host(group)

    def arrived(self, index: int) -> None:
        """See Strategy.arrived."""
        self.gradients.arrived(index)

    def cancel(self) -> None:
        """See Strategy.cancel."""
        self.gradients.cancel()

    def before_step(self) -> None:
        """See Strategy.before_step."""
        self.gradients.before_step()

    def after_step(self) -> None:
        """Implement Strategy.after_step(). Raises RankLostError if a rank has ended."""
        if self._gather is not None:
            self._gather.gather()
        self._shards.gathered()

    def detach(self) -> None:
        """See Strategy.detach."""
        self.gradients.detach()
        self._close()

    def _close(self) -> None:
        if self._gather is not None:
            self._gather.close()
            self._gather = None


def check_shard(shard: str, *, strategy: bool, adasum: bool) -> None:
    """Raise ValueError for an unknown value of `shard`, and for options with which `shard` cannot be used.

    strategy: Did the user pass a strategy? adasum: Is op Adasum?
    """
    if shard not in ("optimizer", "gradients"):
        raise ValueError(
            f'DistributedOptimizer(): shard is {shard!r}; use shard="optimizer" or "gradients", or leave it out.'
        )
    if strategy or adasum:
        what = "strategy" if strategy else "op=hvd.Adasum"
        raise ValueError(
            f"DistributedOptimizer(): shard={shard!r} cannot be combined with {what}: gradients must be the same on "
            "all ranks before a rank steps for the others. Use op=hvd.Average or hvd.Sum."
        )
    if other_engine():
        raise ValueError(
            f"DistributedOptimizer(): shard={shard!r} needs the native engine. {other_engine()}, the engine of this "
            "job, has no all-gather of buckets. Set HVDKIT_ENGINE=native."
        )
