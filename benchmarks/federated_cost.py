"""CPU time of a round outside of training, with and without secure aggregation, all clients in one process.

python -m benchmarks.federated_cost
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hvdkit.torch as hvd
import hvdkit_federated as federated


def train(_: int, weights: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], int]:
    """Do nearly nothing."""
    return [one + 1 for one in weights], 10


def measure(clients: int, size: int, secure: federated.SecureAggregation | None) -> float:
    """The median CPU seconds of three rounds."""
    federation = federated.Federation(range(clients), secure=secure)
    weights = [np.zeros(size, np.float32)]
    spent = []
    for _ in range(3):
        start = time.process_time()
        federation.round(weights, train)
        spent.append(time.process_time() - start)
    return statistics.median(spent)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    hvd.init(log_level="error")
    for clients in (4, 8, 16):
        for size in (10_000, 1_000_000):
            plain, masked = (measure(clients, size, secure) for secure in (None, federated.SecureAggregation()))
            print(f"{clients:2} clients, {size:7} parameters: {1e3 * plain:.0f} ms, secure {1e3 * masked:.0f} ms")


if __name__ == "__main__":
    main()
