"""Learning rates for the joined batch of all ranks, on torch's own optimizers and schedulers."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hvdkit.training.schedules import linear_scale as linear_scale
from hvdkit.training.schedules import square_root_scale as square_root_scale
from hvdkit.training.schedules import warmup_multiplier


def scale_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Multiply the learning rate of every param group by `factor`, once, before any scheduler is made.

    factor: from `linear_scale` or `square_root_scale`, say.
    Raises ValueError if a scheduler has had the optimizer: it keeps learning rates of its own and would undo this.
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            "This optimizer already has a scheduler, or its state comes from a run that had one (and was scaled "
            "there). Call scale_learning_rate before making schedulers and before loading a checkpoint."
        )
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor


class WarmupSchedule(LambdaLR):
    """Raise every param group's learning rate from 1 / factor of it to all of it, over the first epochs.

    Call `step()` after every optimizer step, not every epoch. It multiplies, so it can be chained with other schedulers
    (`torch.optim.lr_scheduler.SequentialLR`, say). Goyal et al., 2017, arXiv:1706.02677, section 2.2.

    factor: what the learning rate was scaled by; 1 leaves it alone.
    warmup_epochs: may be fractional; 0 for none.
    steps_per_epoch: optimizer steps of this rank in an epoch, usually `len(loader)`.
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
            raise ValueError(f"steps_per_epoch is {steps_per_epoch}; it must be 1 or more")

        def multiplier(step: int) -> float:
            return warmup_multiplier(step / steps_per_epoch, factor=factor, warmup_epochs=warmup_epochs)

        super().__init__(optimizer, multiplier, last_epoch)
