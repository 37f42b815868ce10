"""AsynchronousOptimizer: ranks step at their own pace, and servers keep the variables."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.reduce_op import Average
from hvdkit.engine.strategy import Strategy
from hvdkit.keras.backends import settle
from hvdkit.keras.compression import Compression
from hvdkit.keras.distributed import Distributed, sync_of
from hvdkit.keras.optimizer import wrap_optimizer
from hvdkit.keras.settings import OptimizerSettings
from hvdkit.keras.state import sync_state
from hvdkit.keras.statistics import average_statistics
from hvdkit.keras.values import barrier
from hvdkit.strategies.asynchronous import Asynchronous, choose_asynchronous
from hvdkit.strategies.backup_steps import BackupSteps


class FinishedOptimizer(Distributed):
    """Mixin of optimizers with finish(); its methods precede those of the class that updates variables."""

    def finish(self) -> None:
        """Wait until all ranks call it; afterwards their variables are equal; collective. Steps may follow.

        Averages the weights that the `model` does not train. Ranks may have made different numbers of steps, except
        with staleness=0 and BackupSteps(). Call it before variables are evaluated or saved, and before the end of the
        script. Raises RankLostError if a rank has ended.
        """
        sync = sync_of(self)
        if not sync.process_set.included():
            return
        settle()
        if sync.model is not None:
            sync_state(sync.model)
        if sync.strategy is not None:
            # The first step of the other ranks waits for a rank that has made no step.
            sync.attach(self._trainable_variables if self.built else [])  # type: ignore[attr-defined]
        if isinstance(sync.strategy, Asynchronous):
            sync.change_values(sync.strategy.finish)
        elif isinstance(sync.strategy, BackupSteps):
            sync.strategy.finish()
        else:
            barrier(process_set=sync.process_set)
        average_statistics(sync)


def AsynchronousOptimizer(
    optimizer: keras.optimizers.Optimizer | str,
    name: str | None = None,
    staleness: int = 4,
    servers: int = 1,
    *,
    model: keras.Model | None = None,
    scale_by_staleness: bool = False,
    process_set: ProcessSet = global_process_set,
    **others: Any,
) -> Any:
    """Make an optimizer step at this rank's pace; it waits only for ranks whose values would get too old.

    Returns the same object, as DistributedOptimizer() does. The optimizer steps on this rank's own gradients. The rank
    sends the change of its variables, divided by the number of ranks, to the servers. A server adds each change when it
    arrives, and the rank continues from the values that the server then has. Each rank keeps its own optimizer state.
    Call finish() on all ranks after fit(), and in a callback before the callbacks that call collectives;
    MetricAverageCallback calls it. Ranks may make different numbers of steps. A LossScaleOptimizer skips steps of its
    own rank only.

    name: accepted as in DistributedOptimizer(), and ignored.
    staleness: a rank waits when it has sent more changes than this since another rank began its present step. So a rank
    may be staleness + 1 times as fast as the slowest. 0 averages the gradients of all ranks in every step, as
    DistributedOptimizer() does.
    servers: number of servers; each of the first ranks runs a server thread, which keeps a slice of the variables.
    model: the model whose variables the optimizer trains; finish() then also averages its floating-point weights that
    are not trained, such as the moving statistics of BatchNormalization.
    scale_by_staleness: multiply a change by 1 / (1 + s). s is the number of changes that other ranks have sent since
    this rank received its values, divided by the number of ranks and rounded down.
    process_set: the ranks that train together.
    others: other arguments of DistributedOptimizer(), which are refused; the error names the alternative.

    Raises what DistributedOptimizer() raises; ValueError or TypeError for invalid numbers.
    """
    strategy = choose_asynchronous(
        staleness, servers, scaled=scale_by_staleness, process_set=process_set, others=others
    )
    return wrap_finished(optimizer, strategy, process_set, model)


def finish_steps(model: keras.Model) -> None:
    """Call finish() of the model's optimizer, if it has that method, so that ranks can synchronize; collective."""
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, FinishedOptimizer):
        sync_state(model)
        inner.finish()


def wrap_finished(
    optimizer: keras.optimizers.Optimizer | str,
    strategy: Strategy | None,
    process_set: ProcessSet,
    model: keras.Model | None,
) -> Any:
    """Wrap an optimizer that has finish().

    optimizer: an instance or a name.
    strategy: of the optimizer; None for AllReduce.
    process_set: the ranks that train together.
    model: the model whose variables the optimizer trains, if given.
    """
    settings = OptimizerSettings(Compression.none, Average, 1.0, False, process_set, strategy)
    wrapped = wrap_optimizer(optimizer, settings, passes=1, average_passes=False, mixin=FinishedOptimizer)
    return know_model(wrapped, model)


def know_model(optimizer: Any, model: keras.Model | None) -> Any:
    """Store the model, if it is given, as the one that the wrapped optimizer trains; returns the optimizer."""
    sync_of(getattr(optimizer, "inner_optimizer", optimizer)).model = model
    return optimizer
