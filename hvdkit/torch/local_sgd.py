"""LocalSGD and DiLoCo: optimizers whose ranks synchronize once in several steps."""

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

    Returns the same object, as DistributedOptimizer() does. Call synchronize_parameters() on all ranks before the
    parameters are evaluated or saved. state_dict() holds all that is needed to resume training. All ranks make equally
    many steps: it does not work with join(), or with GradScaler, which may skip the step of one rank.

    named_parameters: as for DistributedOptimizer().
    every: number of steps between two averages.
    model: the module whose parameters the optimizer trains, in place of named_parameters; synchronize_parameters() then
    averages its floating-point buffers too, such as the running statistics of BatchNorm.
    start_after: number of first steps on averaged gradients, as DistributedOptimizer's.
    fragments: number of groups of parameters that are averaged at different steps, each group after `every` steps.
    overlap: number of steps for which an average may be under way while training continues.
    compression: as for DistributedOptimizer(), for the data that hosts exchange: the changes of parameters since the
    last average. Compression.Int8() is possible too.
    backward_passes_per_step: as for DistributedOptimizer().
    process_set: the ranks that train together.

    Raises what DistributedOptimizer() raises; ValueError or TypeError for invalid numbers, in the first step for more
    fragments than tensors.
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

    The outer optimizer steps from the parameters of the last synchronization, by the average change of the ranks. All
    ranks continue from its result (A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", 2023).

    outer: hvd.OuterSGD(lr, momentum); by default 0.7 and Nesterov momentum of 0.9. OuterSGD(1.0, 0.0) is LocalSGD().
    The other arguments, and what it raises: as for LocalSGD().
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
