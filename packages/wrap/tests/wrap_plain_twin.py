"""What wrap_twin.py was before it was written for hvdkit; its weights are not seeded alike on purpose."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(64, 6, generator=generator)
labels = torch.randint(0, 3, (64,), generator=generator)
torch.manual_seed(5 + int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0))
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    for x, y in DataLoader(TensorDataset(inputs, labels), batch_size=16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
