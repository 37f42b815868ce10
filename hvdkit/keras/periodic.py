"""Optimizer mixin for LocalSGD and DiLoCo."""

from __future__ import annotations

from typing import Any

from hvdkit.keras.distributed import Distributed, sync_of
from hvdkit.keras.state import broadcast_object, saved_variables, sync_state
from hvdkit.keras.statistics import average_statistics
from hvdkit.strategies.periodic import PeriodicAverage


class PeriodicOptimizer(Distributed):
    """Mixin of LocalSGD() and DiLoCo(); its methods precede those of the class that updates variables."""

    @property
    def strategy(self) -> PeriodicAverage:
        """The optimizer's strategy."""
        strategy = sync_of(self).strategy
        assert isinstance(strategy, PeriodicAverage)
        return strategy

    def synchronize_parameters(self) -> None:
        """Make the variables, and the weights that the `model` does not train, equal on all ranks now; collective.

        Call it before variables are evaluated or saved: after fit(), or in on_epoch_end() of a callback. DiLoCo's outer
        optimizer makes its step. Variables that were synchronized since the last step stay as they are. Raises
        HorovodInternalError if a rank has left, or has made another number of steps.
        """
        sync = sync_of(self)
        if not sync.process_set.included():
            return
        if sync.model is not None:
            sync_state(sync.model)
        # The first step of the other ranks waits for a rank that has made no step.
        sync.attach(self._trainable_variables if self.built else [])  # type: ignore[attr-defined]
        sync.change_values(self.strategy.synchronize)
        average_statistics(sync)


class SavedPeriodicOptimizer:
    """A Handler of elastic.state for the optimizer's variables and its strategy's state."""

    def __init__(self, optimizer: Any) -> None:
        self._variables, self._strategy = saved_variables(optimizer), strategy_of(optimizer)
        self._saved = self._state()

    def _state(self) -> dict[str, Any]:
        return {} if self._strategy is None else self._strategy.state_dict()

    def save(self) -> None:
        """See Handler.save."""
        self._variables.save()
        self._saved = self._state()

    def restore(self) -> None:
        """See Handler.restore."""
        self._variables.restore()
        if self._strategy is not None:
            self._strategy.load_state_dict(self._saved)

    def sync(self) -> None:
        """See Handler.sync."""
        self._variables.sync()
        if self._strategy is not None:
            self._strategy.load_state_dict(broadcast_object(self._state()))


def strategy_of(optimizer: Any) -> PeriodicAverage | None:
    """Return the strategy of an optimizer for LocalSGD or DiLoCo; None for another optimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner.strategy if isinstance(inner, PeriodicOptimizer) else None
