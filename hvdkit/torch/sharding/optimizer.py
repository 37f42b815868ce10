"""Optimizer mixin for sharded state (ZeRO-1 and ZeRO-2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hvdkit.engine import runtime
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.groups import Group
from hvdkit.engine.named.operation import Action
from hvdkit.engine.sharding.bucket_memory import BucketMemory
from hvdkit.engine.sharding.scatter import ScatterGradients
from hvdkit.engine.sharding.strategy import ZeroStrategy
from hvdkit.engine.strategy import Parameters
from hvdkit.torch.device.gradients import find_device_memory
from hvdkit.torch.layout import Named, strides_of
from hvdkit.torch.optimizer_mixin import DistributedOptimizerMixin
from hvdkit.torch.sharding.elementwise import check_elementwise
from hvdkit.torch.sharding.gradient import ShardedGradient
from hvdkit.torch.sharding.gradient_sink import TorchGradientSink
from hvdkit.torch.sharding.shards import TorchOptimizerShards
from hvdkit.torch.tensors import dtype_name


class ZeroOptimizerMixin(DistributedOptimizerMixin):
    """Mixin of optimizers with shard=...; its methods precede those of the optimizer's own class.

    param_groups contain the parameters, as usual; only during the own class's step() they contain this rank's slices.
    """

    _hvdkit_shards: TorchOptimizerShards | None = None

    def _hvdkit_step(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        shards = self._hvdkit_shards
        if shards is None:
            return super()._hvdkit_step(closure, *args, **kwargs)
        if closure is not None:
            with torch.enable_grad():
                closure = _once(closure())
        return shards.step(lambda: super(ZeroOptimizerMixin, self)._hvdkit_step(closure, *args, **kwargs))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as the plain optimizer's, in host memory; collective after the first step.

        It can be loaded without shard, and by any number of ranks.
        """
        return self._hvdkit_state(None)

    def _hvdkit_state(self, root: int | None) -> dict[str, Any]:
        """As state_dict(), but the state of parameters is gathered on rank `root` only; on all for None."""
        shards, own = self._hvdkit_shards, super().state_dict  # type: ignore[misc]
        if shards is None:
            return own()  # type: ignore[no-any-return]
        return shards.state_dict(own, self._hvdkit_together, root)

    def _hvdkit_together(self, action: Action) -> Any:
        assert self._hvdkit is not None
        return self._hvdkit.together("sharded_state", action)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of a plain or a sharded optimizer, saved with any number of ranks.

        All ranks load it, or rank 0 alone before broadcast_optimizer_state(). Raises ValueError for other parameters.
        """
        shards, own = self._hvdkit_shards, super().load_state_dict  # type: ignore[misc]
        if shards is None:
            own(state_dict)
        else:
            shards.load_state_dict(own, state_dict)

    def _hvdkit_share_state(self) -> dict[str, Any]:
        """Return the state that broadcast_optimizer_state() sends from the root; not collective."""
        shards, own = self._hvdkit_shards, super().state_dict  # type: ignore[misc]
        return own() if shards is None else shards.share(own)

    def _hvdkit_take_state(self, state: Mapping[str, Any]) -> None:
        """Load the state that the root has sent."""
        shards, own = self._hvdkit_shards, super().load_state_dict  # type: ignore[misc]
        if shards is not None and state["state"] is None:
            shards.load_options(own, state["param_groups"])
        else:
            self.load_state_dict(state)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """See DistributedOptimizerMixin.zero_grad. Sharded gradients become None, regardless of set_to_none."""
        for group in self.param_groups:  # type: ignore[attr-defined]
            for parameter in group["params"]:
                if isinstance(parameter.grad, ShardedGradient):
                    parameter.grad = None
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See DistributedOptimizerMixin.add_param_group.

        Raises ValueError for a parameter that is not dense in memory.
        """
        super().add_param_group(param_group)
        if self._hvdkit_shards is not None:
            group = self.param_groups[-1]  # type: ignore[attr-defined]
            check_dense([(f"number {at} of the group", parameter) for at, parameter in enumerate(group["params"])])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise an error: a copy of one rank's shards is useless."""
        self._hvdkit_refuse_copies()
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """See __reduce_ex__."""
        self._hvdkit_refuse_copies()
        return super().__deepcopy__(memo)

    def _hvdkit_refuse_copies(self) -> None:
        if self._hvdkit_shards is None:
            return
        raise TypeError(
            "An optimizer with shard=... cannot be copied or pickled, since this rank has a part of its state only. "
            "Call state_dict() on all ranks and load the result into a new optimizer."
        )


def _once(loss: Any) -> Callable[[], Any]:
    """Return a closure that was already evaluated: it returns this loss, to an optimizer that calls it once."""
    losses = [loss]

    def closure() -> Any:
        if not losses:
            raise RuntimeError(
                "The optimizer has evaluated the closure twice in one step. With shard= it has only pieces of the "
                "parameters while it steps. Leave out shard."
            )
        return losses.pop()

    return closure


def check_dense(named: Named) -> None:
    """Raise ValueError for a parameter whose elements are not contiguous in memory."""
    for name, parameter in named:
        if parameter.stride() != strides_of(parameter):
            raise ValueError(
                f"DistributedOptimizer(): shard= needs parameters whose elements lie one after the other in memory, "
                f"and {name} has the strides {parameter.stride()} for the shape {tuple(parameter.shape)}. Call "
                f"parameter.data = parameter.data.contiguous() before."
            )


def open_shards(
    optimizer: torch.optim.Optimizer, named: Named, shard: str, *, master_weights: bool
) -> TorchOptimizerShards:
    """Make the shards of an optimizer. Raises ValueError for one that cannot be divided.

    optimizer: to be divided.
    named: its parameters.
    shard: "optimizer" or "gradients".
    master_weights: see DistributedOptimizer.
    """
    check_elementwise(optimizer)
    check_dense(named)
    sink = TorchGradientSink() if shard == "gradients" else None
    return TorchOptimizerShards(optimizer, master_weights=master_weights, sink=sink)


class TorchZeroStrategy(ZeroStrategy):
    """Sharded, with buckets in GPU memory if the ranks can use NCCL."""

    def find_memory(self, parameters: Parameters, group: Group) -> BucketMemory:
        """See ZeroStrategy.find_memory. Compressed gradients with reduce-scatter go through host memory."""
        options = self.gradients.options
        compressed = any(options.wire_for_tensor(tensor) != "none" for tensor in parameters.tensors)
        memory = None
        if parameters.tensors and not (compressed and isinstance(self.gradients, ScatterGradients)):
            memory = find_device_memory(runtime.runtime("A sharded optimizer"), parameters, group)
        return memory or super().find_memory(parameters, group)


def sharded_strategy(gradients: AllReduce, shards: TorchOptimizerShards, named: Named) -> ZeroStrategy:
    """Make the strategy of these shards. gradients: the strategy without shards.

    Raises ValueError for a coding together with reduce-scatter.
    """
    if shards.sink is None:
        return TorchZeroStrategy(gradients, shards)
    wires = [gradients.options.wire_for(name, dtype_name(parameter)) for name, parameter in named]
    if coded := next((wire for wire in wires if not isinstance(wire, str)), None):
        raise ValueError(
            f'DistributedOptimizer(): shard="gradients" cannot be combined with compression={coded!r}, which sends as '
            'much for a part of a sum as for all of it. Use hvd.Compression.fp16 or bf16, or shard="optimizer".'
        )
    return TorchZeroStrategy(ScatterGradients(gradients.options, shards.sink), shards)
