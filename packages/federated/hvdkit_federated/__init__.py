"""Federated averaging: clients train on data that stays on its rank; the server averages their updates.

Works on lists of numpy arrays; get_weights() and set_weights() take those of a torch module or a Keras model.
"""

from __future__ import annotations

from hvdkit_federated.errors import FederatedError
from hvdkit_federated.models import ProximalTerm, get_weights, proximal_gradient, set_weights
from hvdkit_federated.privacy import GaussianPrivacy
from hvdkit_federated.rounds import Federation, Round
from hvdkit_federated.secure import SecureAggregation
from hvdkit_federated.server import FedAdam, FedAvg, FedAvgM, FedYogi, ServerOptimizer

__version__ = "0.1.0"

__all__ = [
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedYogi",
    "FederatedError",
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
