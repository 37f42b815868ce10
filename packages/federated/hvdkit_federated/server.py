"""Optimizers of the server: a step on the weights from the clients' mean update.

The mean update (weights of the clients minus weights of the round) is already a step of descent; its negative is used
as the gradient. FedAvgM: Hsu et al. 2019, arXiv 1909.06335. FedAdam, FedYogi: Reddi et al. 2021, arXiv 2003.00295,
algorithm 2, without bias correction as there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from hvdkit_federated.errors import FederatedError
from hvdkit_federated.vector import Vector


class ServerOptimizer(ABC):
    """Computes the weights of the next round; every rank has one, and all compute the same."""

    def __init__(self, learning_rate: float) -> None:
        _check("learning_rate", learning_rate, learning_rate > 0, "above 0")
        self.learning_rate = learning_rate
        self._state: dict[str, Vector] = {}

    @abstractmethod
    def step(self, weights: Vector, update: Vector) -> Vector:
        """Compute the new weights (n,).

        weights: (n,), of this round. update: (n,), the mean of the clients' updates.
        """

    def describe(self) -> str:
        """Return the name with the options, which are the same on all ranks."""
        numbers = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in sorted(numbers.items()))})"

    def state_dict(self) -> dict[str, Any]:
        """Return the moments, as arrays (n,); empty before the first step."""
        return {name: value.copy() for name, value in self._state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the moments of a state_dict()."""
        self._state = {name: np.array(value, np.float64) for name, value in state.items()}

    def _moment(self, name: str, like: Vector, value: float = 0.0) -> Vector:
        found = self._state.setdefault(name, np.full(like.shape, value))
        if found.shape != like.shape:
            raise FederatedError(
                f"{type(self).__name__} has moments of {found.size} numbers, but the update has {like.size}. Use a new "
                "server optimizer for another model."
            )
        return found


class FedAvg(ServerOptimizer):
    """Computes weights + learning_rate * update. With 1.0, the mean of the clients' weights (McMahan et al. 2017)."""

    def __init__(self, learning_rate: float = 1.0) -> None:
        super().__init__(learning_rate)

    def step(self, weights: Vector, update: Vector) -> Vector:
        return weights + self.learning_rate * update


class FedAvgM(ServerOptimizer):
    """FedAvg with momentum."""

    def __init__(self, learning_rate: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__(learning_rate)
        _check("momentum", momentum, 0 <= momentum < 1, "from 0 up to, but not, 1")
        self.momentum = momentum

    def step(self, weights: Vector, update: Vector) -> Vector:
        velocity = self._moment("velocity", update)
        self._state["velocity"] = velocity = self.momentum * velocity + update
        return weights + self.learning_rate * velocity


class FedAdam(ServerOptimizer):
    """Adam on the mean update. tau: added to the root of the second moment, which begins as tau**2."""

    def __init__(self, learning_rate: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        super().__init__(learning_rate)
        _check("beta1", beta1, 0 <= beta1 < 1, "from 0 up to, but not, 1")
        _check("beta2", beta2, 0 <= beta2 < 1, "from 0 up to, but not, 1")
        _check("tau", tau, tau > 0, "above 0")
        self.beta1, self.beta2, self.tau = beta1, beta2, tau

    def step(self, weights: Vector, update: Vector) -> Vector:
        first, second = self._moment("first", update), self._moment("second", update, self.tau**2)
        self._state["first"] = first = self.beta1 * first + (1 - self.beta1) * update
        self._state["second"] = second = self._second(second, update * update)
        return weights + self.learning_rate * first / (np.sqrt(second) + self.tau)

    def _second(self, second: Vector, square: Vector) -> Vector:
        return self.beta2 * second + (1 - self.beta2) * square


class FedYogi(FedAdam):
    """As FedAdam, but the second moment moves by (1 - beta2) * update**2 at most."""

    def _second(self, second: Vector, square: Vector) -> Vector:
        moved: Vector = second - (1 - self.beta2) * square * np.sign(second - square)
        return moved


def _check(name: str, value: float, right: bool, bounds: str) -> None:
    if not right:
        raise FederatedError(f"{name} of the server optimizer is {value}; it must be {bounds}.")
