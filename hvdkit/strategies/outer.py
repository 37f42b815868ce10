"""The outer optimizer of DiLoCo: it steps the parameters that all ranks share along their average change."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hvdkit.engine.api import Array

_BLOCK = 32 * 1024  # number of elements that fit in a core's cache


@dataclass(frozen=True)
class OuterSGD:
    """SGD with (Nesterov) momentum, computed as by torch.optim.SGD; the gradient is minus the average change.

    The defaults are those of DiLoCo (A. Douillard et al., 2023). OuterSGD(1.0, 0.0) sets the parameters to their
    average. Raises ValueError unless the learning rate is above 0 and the momentum in [0, 1).
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"OuterSGD(): lr is {self.lr}; it must be a number above 0.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"OuterSGD(): momentum is {self.momentum}; it must be from 0 up to, but not, 1.")

    def step(self, values: Array, change: Array, velocity: Array | None) -> None:
        """Step `values` (n,) in place. change: (n,), overwritten. velocity: (n,), updated; None without momentum."""
        for start in range(0, values.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            self._step(values[part], change[part], None if velocity is None else velocity[part])

    def _step(self, values: Array, change: Array, velocity: Array | None) -> None:
        if velocity is not None:
            np.multiply(velocity, self.momentum, out=velocity)
            np.add(velocity, change, out=velocity)
            if self.nesterov:
                change += self.momentum * velocity
            else:
                np.copyto(change, velocity)
        if self.lr != 1.0:
            np.multiply(change, self.lr, out=change)
        np.add(values, change, out=values)
