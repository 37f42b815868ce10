"""A PyTorch script whose steps are as long as the learning rate, as every gradient is 1; prints those of 3 epochs."""

import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.ones(80)), batch_size=5)
weight = torch.nn.Parameter(torch.zeros(()))
optimizer = torch.optim.SGD([weight], lr=0.1)
steps = []
for _ in range(3):
    for (ones,) in loader:
        before = weight.item()
        optimizer.zero_grad()
        (weight * ones).mean().backward()
        optimizer.step()
        steps.append(before - weight.item())
print(" ".join(f"{step:.5f}" for step in steps))
print(optimizer.param_groups[0]["lr"])
