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
    """Make an optimizer step on the average of the gradients that come first, without waiting for the slowest ranks.

    Returns the same object, as DistributedOptimizer() does. All ranks make equally many steps, each with the same
    gradients on all of them, so variables and optimizer states stay equal. A rank whose gradients come too late takes
    the step that the others have made. Call its finish() on all ranks after fit().

    name: accepted as in DistributedOptimizer(), and ignored.
    drop: of how many ranks a step does not wait; 0 averages the gradients of all ranks, as DistributedOptimizer() does.
    ahead: by how many steps ranks may be before the slowest one; for each, rank 0 may keep gradients in its memory.
    others: refused, with what to use for them.

    Raises what DistributedOptimizer() raises; ValueError or TypeError for numbers that cannot be used.
    """
    strategy = backup_steps.choose_backup_steps(drop, ahead, process_set, others)
    return wrap_finished(optimizer, strategy, process_set, None)
