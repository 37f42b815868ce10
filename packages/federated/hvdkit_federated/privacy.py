"""Differential privacy of clients: updates are clipped, and their sum gets Gaussian noise. The accounting is Google's.

McMahan et al. 2018 (arXiv 1710.06963): each client takes part with the same probability, its update is clipped to a
norm, all updates have the same weight, and the denominator is the expected number of clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdkit.optional_import import optional_import
from hvdkit_federated.errors import FederatedError
from hvdkit_federated.vector import Vector


@dataclass(frozen=True)
class GaussianPrivacy:
    """Clip every client's update and add noise to the sum of a round.

    clip: the largest L2 norm of a client's update. noise: the standard deviation of the noise, in units of clip.
    """

    clip: float
    noise: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.clip) and self.clip > 0):
            raise FederatedError(f"GaussianPrivacy: clip is {self.clip}; it must be above 0.")
        if not (np.isfinite(self.noise) and self.noise > 0):
            raise FederatedError(f"GaussianPrivacy: noise is {self.noise}; it must be above 0.")

    def clipped(self, update: Vector) -> Vector:
        """Scale the update (n,) down to norm clip if it is longer."""
        norm = float(np.linalg.norm(update))
        return update * (self.clip / norm) if norm > self.clip else update

    def noisy(self, total: Vector, generator: np.random.Generator) -> Vector:
        """Add noise to the sum of clipped updates (n,)."""
        return total + generator.normal(0.0, self.noise * self.clip, total.shape)

    def epsilon(self, rounds: int, fraction: float, delta: float) -> float:
        """Compute the epsilon of this number of rounds at this delta, for adding or removing one client.

        fraction: the probability of a client to take part in a round. By Renyi accounting of dp-accounting.
        Raises MissingDependencyError without the package dp-accounting, FederatedError for a delta outside of (0, 1).
        """
        if not 0 < delta < 1:
            raise FederatedError(f"epsilon(): delta is {delta}; it must be between 0 and 1, below 1 / clients.")
        accounting = optional_import("dp_accounting", "privacy", "hvdkit-federated")
        accountant = optional_import("dp_accounting.rdp", "privacy", "hvdkit-federated").RdpAccountant()
        event = accounting.PoissonSampledDpEvent(fraction, accounting.GaussianDpEvent(self.noise))
        if rounds:
            accountant.compose(event, rounds)
        return float(accountant.get_epsilon(delta))
