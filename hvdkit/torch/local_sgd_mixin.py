"""Optimizer mixin for LocalSGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdkit.engine.reduce_op import Average
from hvdkit.strategies.periodic import PeriodicAverage
from hvdkit.torch.optimizer_mixin import DistributedOptimizerMixin
from hvdkit.torch.reduce import grouped_allreduce_
from hvdkit.torch.state import map_nested

_KEY = "periodic_average"


class LocalSGDMixin(DistributedOptimizerMixin):
    """Mixin of LocalSGD() and DiLoCo(); its methods precede those of the optimizer's own class."""

    #: Tensors that synchronize_parameters() averages besides the parameters.
    _hvdkit_buffers: Sequence[torch.Tensor] = ()

    @property
    def strategy(self) -> PeriodicAverage | None:
        """The strategy; None on a rank outside of the process set."""
        sync = self._hvdkit
        return None if sync is None else sync.strategy  # type: ignore[return-value]

    @torch.no_grad()
    def synchronize_parameters(self) -> None:
        """Make the parameters equal on all ranks now, and the buffers of the `model`; collective.

        Call it before parameters are evaluated, saved or exported. DiLoCo's outer optimizer makes its step. Parameters
        that were synchronized since the last step stay as they are. Raises HorovodInternalError if a rank has left, or
        has made another number of steps.
        """
        sync, strategy = self._hvdkit, self.strategy
        if sync is None or strategy is None:
            return
        sync.attach()  # the first step of the other ranks waits for a rank that has made no step
        strategy.synchronize()
        if self._hvdkit_buffers:
            # In float64 the average of equal float32 numbers is exactly that number.
            means = [buffer.double() for buffer in self._hvdkit_buffers]
            grouped_allreduce_(means, op=Average, name=f"{sync.name}.buffers", process_set=sync.process_set)
            torch._foreach_copy_(list(self._hvdkit_buffers), means)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and the strategy's as "periodic_average"; a plain optimizer loads it too."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        strategy = self.strategy
        if strategy is not None:
            state[_KEY] = map_nested(strategy.state_dict(), np.ndarray, torch.from_numpy)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of such an optimizer, or of a plain one; the shared values are then set in the next step."""
        own = {name: value for name, value in state_dict.items() if name != _KEY}
        super().load_state_dict(own)  # type: ignore[misc]
        strategy = self.strategy
        if strategy is not None:
            strategy.load_state_dict(
                map_nested(state_dict.get(_KEY, {}), torch.Tensor, lambda tensor: tensor.cpu().numpy())
            )

    def _hvdkit_share_state(self) -> dict[str, Any]:
        """Cancel averages under way and return the state that broadcast_optimizer_state() sends from the root."""
        if self.strategy is not None:
            self.strategy.drop()
        return self.state_dict()
