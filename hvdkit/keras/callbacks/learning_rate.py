"""Learning rates for the joined batch of all ranks, as callbacks under Horovod's names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras

from hvdkit.engine import runtime as engine
from hvdkit.keras.state import sync_state
from hvdkit.training.schedules import warmup_multiplier


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to initial_lr * multiplier(epoch) from start_epoch to end_epoch.

    initial_lr: the learning rate for all ranks, already scaled.
    multiplier: a function of the epoch, or a number m for m ** epoch.
    start_epoch: the first epoch that it changes.
    end_epoch: the first epoch that it no longer changes; None: no end.
    staircase: True: set the rate once per epoch. False: before each batch, with a fractional epoch; on JAX this copies
    the training state out of the compiled step for every batch.
    momentum_correction: scale the momentum of SGD and RMSprop with the learning rate (Goyal et al., 2017,
    arXiv:1706.02677, section 3).
    steps_per_epoch: of this rank; None: as in fit(). ValueError if both are unknown and staircase is False.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError(
                f"{type(self).__name__}(): initial_lr is None. Pass the learning rate that the multiplier applies to."
            )
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier**epoch
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Determine the number of steps in an epoch; ValueError if it is unknown."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__} needs the number of steps per epoch, but this dataset has no known length. "
                f"Pass steps_per_epoch to {type(self).__name__}() or to fit()."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the number of the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate."""
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ended or (self.staircase and batch):
            return
        fraction = 0.0 if self.staircase else batch / (self.steps_per_epoch or 1)
        self._set_learning_rate(self.initial_lr * self.multiplier(self.current_epoch + fraction))

    def _set_learning_rate(self, rate: float) -> None:
        sync_state(self.model)
        optimizer: Any = self.model.optimizer
        before = float(optimizer.learning_rate)
        optimizer.learning_rate = rate
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self.momentum_correction and getattr(inner, "momentum", None) and before and rate != before:
            for momentum in getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or ():
                momentum.assign(momentum * (rate / before))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the learning rate into the logs, as `lr`."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increase the learning rate from initial_lr / size to initial_lr over the first epochs, with every batch.

    Goyal et al., 2017, arXiv:1706.02677, section 2.2.

    initial_lr: the learning rate for all ranks, usually scaled by their number.
    warmup_epochs: number of epochs of the increase.
    momentum_correction: as for LearningRateScheduleCallback.
    steps_per_epoch: as for LearningRateScheduleCallback.
    verbose: 1: rank 0 prints a line at the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        size = engine.runtime("LearningRateWarmupCallback").world.size

        def multiplier(epoch: float) -> float:
            # The last batch of an epoch gets the rate of the epoch's end, for round numbers in logs and plots.
            reached = epoch + 1 / (self.steps_per_epoch or 1)
            return warmup_multiplier(reached, factor=size, warmup_epochs=warmup_epochs)

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Print the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        first = engine.runtime("LearningRateWarmupCallback").world.rank == 0
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and first:
            rate = float(self.model.optimizer.learning_rate)
            sys.stdout.write(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.\n")
