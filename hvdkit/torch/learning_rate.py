"""Learning rates for the joined batch of all ranks, on torch's own optimizers and schedulers."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hvdkit.training.schedules import linear_scale as linear_scale
from hvdkit.training.schedules import square_root_scale as square_root_scale
from hvdkit.training.schedules import warmup_multiplier


def scale_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Multiply the learning rate of every param group by `factor`. Call it once, before you create a scheduler.

    factor: for example from `linear_scale` or `square_root_scale`.
    Raises ValueError if the optimizer already has a scheduler, which keeps its own learning rates and would undo this.
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            "scale_learning_rate(): this optimizer already has a scheduler, or its state comes from a run that had one "
            "(and was scaled in that run). Call scale_learning_rate() before you create a scheduler or load a "
            "checkpoint."
        )
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor


class WarmupSchedule(LambdaLR):
    """Increase the learning rate of every param group from 1 / factor of its value to its value in the first epochs.

    Call `step()` after every optimizer step, not after every epoch. It multiplies the rate, so it can be chained with
    other schedulers (for example `torch.optim.lr_scheduler.SequentialLR`). Goyal et al., 2017, arXiv:1706.02677,
    section 2.2.

    factor: the factor by which the learning rate was scaled; 1 for no warm-up.
    warmup_epochs: number of epochs, may be fractional; 0 for no warm-up.
    steps_per_epoch: optimizer steps of this rank per epoch, usually `len(loader)`; ValueError for less than 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        factor: float,
        warmup_epochs: float,
        steps_per_epoch: int,
        last_epoch: int = -1,
    ) -> None:
        if steps_per_epoch < 1:
            raise ValueError(f"WarmupSchedule(): steps_per_epoch is {steps_per_epoch}; it must be 1 or more.")

        def multiplier(step: int) -> float:
            return warmup_multiplier(step / steps_per_epoch, factor=factor, warmup_epochs=warmup_epochs)

        super().__init__(optimizer, multiplier, last_epoch)
