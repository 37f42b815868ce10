"""LocalSGD and DiLoCo: optimizers whose ranks meet after many steps, not in every one."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.engine import runtime
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.compression import Coded
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.reduce_op import Average
from hvdkit.engine.request import gradient_options
from hvdkit.strategies import diloco, local_sgd
from hvdkit.strategies.outer import OuterSGD
from hvdkit.strategies.periodic import PeriodicAverage
from hvdkit.torch.compression import Compression, Compressor
from hvdkit.torch.optimizer import DistributedOptimizer, NamedParameters
from hvdkit.torch.strategies import TorchAllReduce


def LocalSGD(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    every: int = 8,
    *,
    model: torch.nn.Module | None = None,
    start_after: int = 0,
    fragments: int = 1,
    overlap: int = 0,
    compression: type[Compressor] | Coded = Compression.none,
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer step on this rank's gradients, and average the parameters over all ranks after `every` steps.

    Returns the same object, as DistributedOptimizer() does. Call its synchronize_parameters(), on all ranks, before the
    parameters are evaluated or saved. Its state_dict() holds what training goes on from. All ranks take equally many
    steps: neither join() nor GradScaler, which may skip the step of one rank, goes with it.

    named_parameters: as for DistributedOptimizer(). model: whose parameters the optimizer trains, in place of
    named_parameters; synchronize_parameters() then averages its floating-point buffers too, such as the running
    statistics of BatchNorm.
    start_after: so many first steps on averaged gradients, as DistributedOptimizer's.
    fragments: into how many parts the parameters are divided, which are averaged at different steps, each after every
    `every`. overlap: for how many steps an average may be under way while training goes on.
    compression: as for DistributedOptimizer(), of what is sent between hosts: the changes of parameters since they were
    averaged. Compression.Int8() goes too.
    backward_passes_per_step: as for DistributedOptimizer().

    Raises what DistributedOptimizer() raises; ValueError or TypeError for numbers that cannot be used, in the first
    step for more fragments than tensors.
    """
    gradients = _gradients(compression)
    strategy = local_sgd.LocalSGD(
        every, start_after=start_after, fragments=fragments, overlap=overlap, gradients=gradients
    )
    return _wrap(optimizer, named_parameters, strategy, model, backward_passes_per_step, process_set)


def DiLoCo(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    every: int = 100,
    *,
    outer: OuterSGD | None = None,
    model: torch.nn.Module | None = None,
    start_after: int = 0,
    fragments: int = 1,
    overlap: int = 0,
    compression: type[Compressor] | Coded = Compression.none,
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer step on this rank's gradients, and an outer optimizer step on all changes after `every` steps.

    All ranks then go on from what the outer optimizer has made of the parameters that they began with, and of the
    average change (A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023).

    outer: hvd.OuterSGD(lr, momentum); by default 0.7 and Nesterov momentum of 0.9. OuterSGD(1.0, 0.0) is LocalSGD().
    The other arguments, and what it raises: as LocalSGD().
    """
    gradients = _gradients(compression)
    strategy = diloco.DiLoCo(
        every, outer=outer, start_after=start_after, fragments=fragments, overlap=overlap, gradients=gradients
    )
    return _wrap(optimizer, named_parameters, strategy, model, backward_passes_per_step, process_set)


def _gradients(compression: Any) -> AllReduce:
    return TorchAllReduce(gradient_options(Average, 1.0, compression))


def _wrap(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None,
    strategy: PeriodicAverage,
    model: torch.nn.Module | None,
    passes: int,
    process_set: ProcessSet,
) -> Any:
    runtime.runtime(f"{type(strategy).__name__}()")
    if model is not None and named_parameters is None:
        named_parameters = model.named_parameters()
    wrapped = DistributedOptimizer(
        optimizer,
        named_parameters,
        backward_passes_per_step=passes,
        process_set=process_set,
        strategy=strategy,
    )
    if model is not None:
        wrapped._hvdkit_buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return wrapped
