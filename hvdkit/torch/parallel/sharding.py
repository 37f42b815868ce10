"""shard(): parameters, gradients, optimizer state over the replicas (FSDP2). recompute(): drops activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard

from hvdkit.errors import ParallelError
from hvdkit.torch.parallel.mesh import Mesh, take_mesh
from hvdkit.torch.parallel.modules import put, select_blocks
from hvdkit.torch.parallel.pipeline import ZERO_BUBBLE, Pipeline, modules_of

Model = TypeVar("Model", nn.Module, Pipeline)


def shard(
    model: Model, *, blocks: str | Sequence[str] | None = None, mesh: Mesh | None = None, **options: Any
) -> Model:
    """Shard parameters, gradients and optimizer state over the dp ranks of the mesh, in place; returns the model.

    A collective call, after tensor_parallel() and recompute(), before the optimizer is made. backward() averages the
    gradients over the replicas, so the optimizer is a plain one. The ranks must hold the same weights.
    blocks: patterns of the modules that are gathered one at a time, such as "layers.*"; default: the repeating modules.
    options: of torch's fully_shard: mp_policy, offload_policy, reshard_after_forward, ...
    Raises ParallelError for a pattern without a module, a model that is already sharded, and a pipeline with a
    zero-bubble schedule over several replicas.
    """
    mesh = take_mesh(mesh, "shard()")
    replicas = mesh.device_mesh["dp"]
    if isinstance(model, Pipeline) and model.schedule in ZERO_BUBBLE and mesh.dp > 1:
        raise ParallelError(
            f"shard(): with the schedule {model.schedule} FSDP2 would lose gradients of weights, which torch computes "
            "apart. Use pipeline(schedule='DualPipeV'), '1F1B' or 'Interleaved1F1B'."
        )
    for module in modules_of(model):
        if any(isinstance(each, FSDPModule) for each in module.modules()):
            raise ParallelError("shard(): the model, or a part of it, is sharded already. Call shard() once.")
        for name in select_blocks("shard()", module, blocks):
            fully_shard(module.get_submodule(name), mesh=replicas, **options)
        fully_shard(module, mesh=replicas, **options)
    return model


def recompute(model: Model, *, blocks: str | Sequence[str] | None = None) -> Model:
    """Keep only the inputs of blocks in forward, and compute them again in backward; in place, returns the model.

    Call it after tensor_parallel(), before shard(). blocks: patterns, such as "layers.*"; default: the repeating
    modules.
    Names in state_dict() stay as they are.
    Raises ParallelError for a pattern without a module, and for a model that is already sharded.
    """
    for module in modules_of(model):
        if any(isinstance(each, FSDPModule) for each in module.modules()):
            raise ParallelError("recompute(): the model is sharded already. Call recompute() before shard().")
        for name in select_blocks("recompute()", module, blocks):
            block = module.get_submodule(name)
            if not isinstance(block, CheckpointWrapper):
                put(module, name, checkpoint_wrapper(block))
    return model
