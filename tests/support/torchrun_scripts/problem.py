"""What the scripts for torchrun beside this file train, and the same training by one process on whole batches."""

from __future__ import annotations

import json

import torch
from torch.utils.data import TensorDataset

BATCH, STEPS, RATE = 12, 8, 0.05  # 1, 2 and 3 ranks have equal parts of a batch


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * STEPS, 6, generator=generator)
    return TensorDataset(inputs, torch.sin(inputs.sum(dim=1, keepdim=True)))


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))


def train_alone() -> list[float]:
    """The weights that one process gets."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    inputs, targets = make_data().tensors
    for first in range(0, len(inputs), BATCH):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[first : first + BATCH]), targets[first : first + BATCH]).backward()
        optimizer.step()
    return flatten(list(model.parameters()))


def flatten(parameters: list[torch.Tensor]) -> list[float]:
    return [float(value) for one in parameters for value in one.detach().flatten()]


def report(rank: int, size: int, parameters: list[torch.Tensor]) -> None:
    """Print the weights of a rank as a line of JSON."""
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else ""
    print(json.dumps({"rank": rank, "size": size, "backend": backend, "weights": flatten(parameters)}), flush=True)
