"""BackupSteps: steps that do not wait for the slowest ranks' gradients."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.strategies import backup_steps
from hvdkit.torch.asynchronous import AsynchronousMixin
from hvdkit.torch.optimizer import DistributedOptimizer, NamedParameters
from hvdkit.torch.picklable_as_plain import change_class


class BackupStepsMixin(AsynchronousMixin):
    """Mixin of BackupSteps(); its methods precede those of the optimizer's own class."""

    @property
    def behind(self) -> int:
        """Number of this rank's next steps that are already decided: synchronize() can replace backward() in them."""
        strategy = self._backup_strategy()
        return 0 if strategy is None else strategy.behind

    @property
    def dropped(self) -> int:
        """Number of steps that were made without this rank's gradients."""
        strategy = self._backup_strategy()
        return 0 if strategy is None else strategy.dropped

    def synchronize(self) -> None:
        """Take the gradients of an already decided step, in place of backward().

        See DistributedOptimizerMixin.synchronize.
        """
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
    """Make an optimizer step on the average of the gradients that arrive first, without waiting for the slowest ranks.

    Returns the same object, as DistributedOptimizer() does. All ranks make equally many steps, and in each step all
    ranks use the same gradients, so parameters and optimizer states stay equal. A rank whose gradients arrive too late
    makes the step that the others have made. To catch up it need not compute gradients for already decided steps:

        if optimizer.behind:
            optimizer.synchronize()  # takes the gradients that the others have made
        else:
            loss_of(model(inputs), targets).backward()
        optimizer.step()

    Call finish() on all ranks after their last step. Clipping and GradScaler see the average.

    named_parameters: as for DistributedOptimizer().
    drop: number of ranks that a step does not wait for; 0 averages the gradients of all ranks, as
    DistributedOptimizer() does.
    ahead: number of steps that ranks may be ahead of the slowest one; rank 0 may keep the gradients of each in memory.
    backward_passes_per_step: as for DistributedOptimizer().
    process_set: the ranks that train together.
    others: other arguments of DistributedOptimizer(), which are refused; the error names the alternative.

    Raises what DistributedOptimizer() raises; ValueError or TypeError for invalid numbers.
    """
    strategy = backup_steps.choose_backup_steps(drop, ahead, process_set, others)
    wrapped = DistributedOptimizer(
        optimizer,
        named_parameters,
        backward_passes_per_step=backward_passes_per_step,
        process_set=process_set,
        strategy=strategy,
    )
    change_class(wrapped, BackupStepsMixin, wrapped._parameter_names, {"_hvdkit_set": process_set})
    return wrapped
