"""A script for torchrun, without hvdkit: DistributedDataParallel on Gloo. hvdrun starts it as torchrun does.

hvdrun -np 2 python examples/torchrun/ddp_regression.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(512, 8, generator=generator)
dataset = TensorDataset(inputs, inputs @ torch.arange(8.0).reshape(8, 1))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, batch_size=32 // size, sampler=sampler)

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for features, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: loss {total.item() / size:.4f} on {size} ranks")

dist.destroy_process_group()
