"""BackupSteps: steps that do not wait for the slowest ranks' gradients."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.keras.asynchronous import wrap_finished
from hvdkit.strategies import backup_steps


def BackupSteps(
    optimizer: keras.optimizers.Optimizer | str,
    name: str | None = None,
    drop: int = 1,
    *,
    ahead: int = 16,
    process_set: ProcessSet = global_process_set,
    **others: Any,
) -> Any:
    """Make an optimizer step on the average of the gradients that arrive first, without waiting for the slowest ranks.

    Returns the same object, as DistributedOptimizer() does. All ranks make equally many steps, and in each step all
    ranks use the same gradients, so variables and optimizer states stay equal. A rank whose gradients arrive too late
    makes the step that the others have made. Call finish() on all ranks after fit().

    name: accepted as in DistributedOptimizer(), and ignored.
    drop: number of ranks that a step does not wait for; 0 averages the gradients of all ranks, as
    DistributedOptimizer() does.
    ahead: number of steps that ranks may be ahead of the slowest one; rank 0 may keep the gradients of each in memory.
    process_set: the ranks that train together.
    others: other arguments of DistributedOptimizer(), which are refused; the error names the alternative.

    Raises what DistributedOptimizer() raises; ValueError or TypeError for invalid numbers.
    """
    strategy = backup_steps.choose_backup_steps(drop, ahead, process_set, others)
    return wrap_finished(optimizer, strategy, process_set, None)
