"""BackupSteps: steps that do not wait for the slowest ranks' gradients."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.strategies import backup_steps
from hvdkit.torch.asynchronous import AsynchronousWrapped
from hvdkit.torch.optimizer import DistributedOptimizer, NamedParameters
from hvdkit.torch.plain_copies import change_class


class BackupWrapped(AsynchronousWrapped):
    """Mixed in before the optimizer's own class."""

    @property
    def behind(self) -> int:
        """How many of this rank's next steps are decided already, so that synchronize() can replace backward()."""
        strategy = self._backup_strategy()
        return 0 if strategy is None else strategy.behind

    @property
    def dropped(self) -> int:
        """How many steps were made without this rank's gradients."""
        strategy = self._backup_strategy()
        return 0 if strategy is None else strategy.dropped

    def synchronize(self) -> None:
        """Take the gradients of a step that is decided already, in place of backward(); see Wrapped.synchronize."""
        super().synchronize()
        self._hvdkit_synchronized = False  # step() follows without skip_synchronize()

    def _backup_strategy(self) -> backup_steps.BackupSteps | None:
        strategy = None if self._hvdkit is None else self._hvdkit.strategy
        return strategy if isinstance(strategy, backup_steps.BackupSteps) else None


def BackupSteps(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    drop: int = 1,
    *,
    ahead: int = 16,
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
    **others: Any,
) -> Any:
    """Make an optimizer step on the average of the gradients that come first, without waiting for the slowest ranks.

    Returns the same object, as DistributedOptimizer() does. All ranks make equally many steps, each with the same
    gradients on all of them, so parameters and optimizer states stay equal. A rank whose gradients come too late takes
    the step that the others have made. To catch up it need not compute gradients for steps that are decided already:

        if optimizer.behind:
            optimizer.synchronize()  # takes the gradients that the others have made
        else:
            loss_of(model(inputs), targets).backward()
        optimizer.step()

    Call its finish() on all ranks after their last step. Clipping and GradScaler see the average.

    named_parameters: as for DistributedOptimizer().
    drop: of how many ranks a step does not wait; 0 averages the gradients of all ranks, as DistributedOptimizer() does.
    ahead: by how many steps ranks may be before the slowest one; for each, rank 0 may keep gradients in its memory.
    backward_passes_per_step: as for DistributedOptimizer(). others: refused, with what to use for them.

    Raises what DistributedOptimizer() raises; ValueError or TypeError for numbers that cannot be used.
    """
    strategy = backup_steps.choose_backup_steps(drop, ahead, process_set, others)
    wrapped = DistributedOptimizer(
        optimizer,
        named_parameters,
        backward_passes_per_step=backward_passes_per_step,
        process_set=process_set,
        strategy=strategy,
    )
    change_class(wrapped, BackupWrapped, wrapped._parameter_names, {"_hvdkit_set": process_set})
    return wrapped
