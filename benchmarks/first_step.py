"""What benchmarks.start starts: a script of a user's, up to its first step."""

from __future__ import annotations

import torch

import hvdkit.torch as hvd


def main() -> None:
    """Train one step, and say so on rank 0."""
    torch.set_num_threads(1)
    hvd.init()
    model = torch.nn.Linear(64, 10)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    if hvd.rank() == 0:
        print("stepped", flush=True)


if __name__ == "__main__":
    main()
