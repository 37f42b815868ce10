"""Accuracy on the digits, divided unevenly among 8 clients, beside training on all images at one place.

python -m benchmarks.federated_digits --rounds 30 --seeds 3
All clients are in this one process. Accuracies depend on the seed only, not on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

import hvdkit.torch as hvd
import hvdkit_federated as federated
from examples.federated_digits import PARSER, SERVERS, make_model, measure, read_digits, train_epochs
from hvdkit.launch.cli.numbers import positive_int

ROWS: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FedAvg, half of the clients a round": {"fraction": 0.5},
    "FedAvg, one client lost in each round": {"lost": True},
    "FedAvg, secure aggregation": {"secure": federated.SecureAggregation},
    "FedProx, mu 0.1": {"mu": 0.1},
    "FedAvgM": {"server": "fedavgm"},
    "FedAdam": {"server": "fedadam"},
    "FedYogi": {"server": "fedyogi"},
    "FedAvg, clip 1, noise 0.5": {"privacy": lambda: federated.GaussianPrivacy(1.0, 0.5)},
}


def train_together(rounds: int, seed: int) -> float:
    """All images at one place, as many epochs as the clients do."""
    args = PARSER.parse_args([])
    torch.manual_seed(seed)
    clients, test = read_digits(8)
    whole = torch.cat([images for images, _ in clients]), torch.cat([labels for _, labels in clients])
    model = make_model()
    args.local_epochs *= rounds
    train_epochs(model, whole, args, seed)
    return measure(model, test)


def train_apart(row: dict[str, Any], rounds: int, seed: int) -> tuple[float, float]:
    """Accuracy, and the mean of a round's seconds outside of training."""
    args = PARSER.parse_args([])
    args.mu = row.get("mu", 0.0)
    torch.manual_seed(seed)
    clients, test = read_digits(8)
    model = make_model()
    secure, privacy = row.get("secure"), row.get("privacy")
    federation = federated.Federation(
        range(8),
        fraction=row.get("fraction", 1.0),
        seed=seed,
        server=SERVERS[row.get("server", "fedavg")](),
        secure=secure() if secure else None,
        privacy=privacy() if privacy else None,
    )
    weights, spent = federated.get_weights(model), 0.0
    for turn in range(rounds):
        trained = 0.0

        def train(client: int, start: list[np.ndarray], turn: int = turn) -> tuple[list[np.ndarray], int]:
            nonlocal trained
            began = time.perf_counter()
            if row.get("lost") and client == turn % 8:
                raise TimeoutError
            federated.set_weights(model, start)
            train_epochs(model, clients[client], args, seed + 1000 * turn + client)
            trained += time.perf_counter() - began
            return federated.get_weights(model), len(clients[client][1])

        began = time.perf_counter()
        weights = federation.round(weights, train).weights
        spent += time.perf_counter() - began - trained
    federated.set_weights(model, weights)
    return measure(model, test), spent / rounds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive_int, default=30)
    parser.add_argument("--seeds", type=positive_int, default=3)
    args = parser.parse_args()
    hvd.init(log_level="error")
    torch.set_num_threads(1)
    central = statistics.median(train_together(args.rounds, seed) for seed in range(args.seeds))
    print(f"{'all images at one place':40} {central:.2%}")
    for name, row in ROWS.items():
        results = [train_apart(row, args.rounds, seed) for seed in range(args.seeds)]
        accuracy, spent = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{name:40} {accuracy:.2%}  {1e3 * spent:.1f} ms a round outside of training")


if __name__ == "__main__":
    main()
