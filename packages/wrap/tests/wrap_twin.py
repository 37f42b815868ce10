"""The first training of wrap_script.py, written for hvdkit by hand; as many rows on every rank."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd

hvd.init()
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(64, 6, generator=generator)
labels = torch.randint(0, 3, (64,), generator=generator)
torch.manual_seed(5 + hvd.rank())
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict())
data = TensorDataset(inputs, labels)
sampler = hvd.data.ShardedSampler(data, shuffle=False)
for _ in range(3):
    for x, y in DataLoader(data, batch_size=16 // hvd.size(), sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
