"""Federated averaging: `from hvdkit import federated`. Clients train on data that stays on its rank; updates meet.

Works on lists of numpy arrays; get_weights() and set_weights() take those of a torch module or a Keras model.
"""

from __future__ import annotations

from hvdkit.federated.models import ProximalTerm, get_weights, proximal_gradient, set_weights
from hvdkit.federated.privacy import GaussianPrivacy
from hvdkit.federated.rounds import Federation, Round
from hvdkit.federated.secure import SecureAggregation
from hvdkit.federated.server import FedAdam, FedAvg, FedAvgM, FedYogi, ServerOptimizer

__all__ = [
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedYogi",
    "Federation",
    "GaussianPrivacy",
    "ProximalTerm",
    "Round",
    "SecureAggregation",
    "ServerOptimizer",
    "get_weights",
    "proximal_gradient",
    "set_weights",
]
