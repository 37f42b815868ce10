"""LocalSGD and DiLoCo: optimizers whose ranks synchronize once in several steps."""

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

    Returns the same object, as DistributedOptimizer() does. Call synchronize_parameters() on all ranks before the
    variables are evaluated or saved: after fit(), or in on_epoch_end() of a callback. All ranks make equally many
    steps; a LossScaleOptimizer makes them skip the same steps. With gradient accumulation a window is a step.

    name: accepted as in DistributedOptimizer(), and ignored.
    every: number of steps between two averages.
    model: the model whose variables the optimizer trains; synchronize_parameters() then also averages its
    floating-point weights that are not trained, such as the moving statistics of BatchNormalization.
    start_after: number of first steps on averaged gradients, as DistributedOptimizer's.
    fragments: number of groups of variables that are averaged at different steps, each group after `every` steps.
    overlap: number of steps for which an average may be under way while training continues.
    compression: as for DistributedOptimizer(), for the data that hosts exchange: the changes of variables since the
    last average. Compression.Int8() is possible too.
    process_set: the ranks that train together.

    Raises what DistributedOptimizer() raises; ValueError or TypeError for invalid numbers, in the first step for more
    fragments than variables.
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

    The outer optimizer steps from the variables of the last synchronization, by the average change of the ranks. All
    ranks continue from its result (A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", 2023).

    outer: hvd.OuterSGD(lr, momentum); by default 0.7 and Nesterov momentum of 0.9. OuterSGD(1.0, 0.0) is LocalSGD().
    The other arguments, and what it raises: as for LocalSGD().
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
