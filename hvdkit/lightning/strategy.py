"""Lightning's strategy "hvdkit": gradients are reduced by hvdkit's DistributedOptimizer, under any launcher."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from hvdkit.engine.basics import rank, size
from hvdkit.engine.job_objects import broadcast_object
from hvdkit.engine.reduce_op import Average, Max, Min, Product, ReduceOp, Sum
from hvdkit.errors import ConfigError
from hvdkit.lightning.environment import HvdkitEnvironment
from hvdkit.torch.basics import init, local_device
from hvdkit.torch.ops import allgather, barrier
from hvdkit.torch.optimizer import DistributedOptimizer
from hvdkit.torch.optimizer_mixin import DistributedOptimizerMixin
from hvdkit.torch.process_group.register import join_world
from hvdkit.torch.reduce import allreduce
from hvdkit.torch.state import broadcast_parameters

_OPS = {
    **dict.fromkeys(("mean", "avg", "average"), Average),
    "sum": Sum,
    "max": Max,
    "min": Min,
    "product": Product,
}
_NEVER = 1 << 30  # passes per window while gradients are only accumulated

#: All existing optimizers of fits so far. Python's collector frees those of a Trainer, on each rank at its own time;
#: until then they would reduce the gradients of a later fit of the module too.
_fitted: weakref.WeakSet[Any] = weakref.WeakSet()


class HvdkitStrategy(ParallelStrategy):
    """Train a LightningModule on all ranks of the job, with any launcher.

    Use Trainer(strategy="hvdkit") after `import hvdkit.lightning`; `devices` and `num_nodes` are not needed.
    optimizer_options: of hvd.DistributedOptimizer, such as compression=hvd.Compression.fp16 or shard="optimizer".
    On CPUs torch.distributed uses hvdkit's process group too, for torchmetrics and the script's own calls.
    """

    strategy_name = "hvdkit"

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **optimizer_options: Any,
    ) -> None:
        init()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment or HvdkitEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._optimizer_options = optimizer_options
        rank_zero_only.rank = rank()  # type: ignore[attr-defined]

    @property
    def is_distributed(self) -> bool:
        """True: Lightning then gives each rank its shard of the data."""
        return True

    @property
    def root_device(self) -> torch.device:
        """The CPU, or this rank's GPU."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return torch.device("cpu") if devices[0].type == "cpu" else local_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments that select this rank's shard of the data."""
        return {"num_replicas": size(), "rank": rank()}

    def setup_environment(self) -> None:
        """Prepare the device and, on CPUs, torch.distributed."""
        super().setup_environment()
        if self.root_device.type == "cpu":
            join_world()

    def setup(self, trainer: pl.Trainer) -> None:
        """Broadcast rank 0's model, and make its optimizers step on the gradients of all ranks."""
        if self._layer_sync is not None:
            raise ConfigError(
                "Trainer(sync_batchnorm=True) does not work with strategy='hvdkit'. Use hvd.SyncBatchNorm layers in "
                "the model."
            )
        super().setup(trainer)
        assert self.model is not None
        broadcast_parameters(self.model.state_dict(), root_rank=0)
        if trainer.state.fn == TrainerFn.FITTING:
            named = list(self.model.named_parameters())
            self.optimizers = [
                optimizer
                if isinstance(optimizer, DistributedOptimizerMixin)
                else DistributedOptimizer(optimizer, named, **self._optimizer_options)
                for optimizer in self.optimizers
            ]
            _release(self.model, self.optimizers)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context that accumulates gradients without reducing them: Trainer(accumulate_grad_batches=N)."""
        wrapped = [optimizer for optimizer in self.optimizers if isinstance(optimizer, DistributedOptimizerMixin)]
        for optimizer in wrapped:
            optimizer.set_backward_passes_per_step(_NEVER)
        try:
            yield
        finally:
            for optimizer in wrapped:
                optimizer.set_backward_passes_per_step(1)

    def model_to_device(self) -> None:
        """See Strategy."""
        assert self.model is not None
        self.model.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """See Strategy."""
        barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """See Strategy."""
        return broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See Strategy. Raises ConfigError for a group of some ranks, or an operation that hvdkit lacks."""
        _refuse_group(group)
        if not isinstance(tensor, torch.Tensor):
            return tensor
        op = _op_of(reduce_op)
        if op is Average and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.float()
        return allreduce(tensor, op=op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return all ranks' tensors, (ranks, ...). Raises ConfigError for a group of some ranks."""
        _refuse_group(group)
        gathered: torch.Tensor = allgather((tensor if sync_grads else tensor.detach()).unsqueeze(0))
        return gathered


def _release(model: torch.nn.Module, optimizers: Sequence[Any]) -> None:
    """Stop the optimizers of earlier fits from reducing the model's gradients."""
    trained = set(model.parameters())
    for earlier in set(_fitted).difference(optimizers):
        parameters = (parameter for group in earlier.param_groups for parameter in group["params"])
        if earlier._hvdkit is not None and not trained.isdisjoint(parameters):
            earlier._hvdkit.unhook()
    _fitted.update(optimizers)


def _op_of(reduce_op: Any) -> ReduceOp:
    name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower().rpartition(".")[2]
    if name not in _OPS:
        raise ConfigError(f"strategy='hvdkit' has no reduction {reduce_op!r}. Use one of {', '.join(_OPS)}.")
    return _OPS[name]


def _refuse_group(group: Any) -> None:
    if group is not None and group is not getattr(dist, "GroupMember", dist.group).WORLD:
        raise ConfigError("strategy='hvdkit' reduces over all ranks. For some of them use hvd.allreduce(process_set=).")


def register() -> None:
    """Register the strategy for Trainer(strategy="hvdkit")."""
    if HvdkitStrategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(
            HvdkitStrategy.strategy_name, HvdkitStrategy, description="hvdkit's DistributedOptimizer"
        )
