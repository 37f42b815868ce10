"""LocalSGD and DiLoCo: optimizers whose ranks meet after many steps, not in every one."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit.engine import runtime
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.compression import Coded
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.reduce_op import Average
from hvdkit.engine.request import gradient_options
from hvdkit.keras.asynchronous import know_model
from hvdkit.keras.compression import Compression, Compressor
from hvdkit.keras.optimizer import DistributedOptimizer
from hvdkit.strategies import diloco, local_sgd
from hvdkit.strategies.outer import OuterSGD
from hvdkit.strategies.periodic import PeriodicAverage


def LocalSGD(
    optimizer: keras.optimizers.Optimizer | str,
    name: str | None = None,
    every: int = 8,
    *,
    model: keras.Model | None = None,
    start_after: int = 0,
    fragments: int = 1,
    overlap: int = 0,
    compression: type[Compressor] | Coded = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer step on this rank's gradients, and average the variables over all ranks after `every` steps.

    Returns the same object, as DistributedOptimizer() does. Call its synchronize_parameters(), on all ranks, before the
    variables are evaluated or saved: after fit(), or in on_epoch_end() of a callback. All ranks take equally many
    steps; a LossScaleOptimizer has them skip the same. With gradient accumulation a window is a step.

    name: accepted as in DistributedOptimizer(), and ignored.
    model: whose variables the optimizer trains; synchronize_parameters() then averages its floating-point weights that
    are not trained too, such as the moving statistics of BatchNormalization.
    start_after: so many first steps on averaged gradients, as DistributedOptimizer's.
    fragments: into how many parts the variables are divided, which are averaged at different steps, each after every
    `every`. overlap: for how many steps an average may be under way while training goes on.
    compression: as for DistributedOptimizer(), of what is sent between hosts: the changes of variables since they were
    averaged. Compression.Int8() goes too.

    Raises what DistributedOptimizer() raises; ValueError or TypeError for numbers that cannot be used, in the first
    step for more fragments than variables.
    """
    gradients = _gradients(compression)
    strategy = local_sgd.LocalSGD(
        every, start_after=start_after, fragments=fragments, overlap=overlap, gradients=gradients
    )
    return _wrap(optimizer, strategy, model, process_set)


def DiLoCo(
    optimizer: keras.optimizers.Optimizer | str,
    name: str | None = None,
    every: int = 100,
    *,
    outer: OuterSGD | None = None,
    model: keras.Model | None = None,
    start_after: int = 0,
    fragments: int = 1,
    overlap: int = 0,
    compression: type[Compressor] | Coded = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer step on this rank's gradients, and an outer optimizer step on all changes after `every` steps.

    All ranks then go on from what the outer optimizer has made of the variables that they began with, and of the
    average change (A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023).

    outer: hvd.OuterSGD(lr, momentum); by default 0.7 and Nesterov momentum of 0.9. OuterSGD(1.0, 0.0) is LocalSGD().
    The other arguments, and what it raises: as LocalSGD().
    """
    gradients = _gradients(compression)
    strategy = diloco.DiLoCo(
        every, outer=outer, start_after=start_after, fragments=fragments, overlap=overlap, gradients=gradients
    )
    return _wrap(optimizer, strategy, model, process_set)


def _gradients(compression: Any) -> AllReduce:
    return AllReduce(gradient_options(Average, 1.0, compression))


def _wrap(optimizer: Any, strategy: PeriodicAverage, model: keras.Model | None, process_set: ProcessSet) -> Any:
    runtime.runtime(f"{type(strategy).__name__}()")
    return know_model(DistributedOptimizer(optimizer, process_set=process_set, strategy=strategy), model)
