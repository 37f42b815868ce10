"""Trap: whether the loader shuffles stands in a dictionary."""
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(80, 2)
kwargs = {"batch_size": 8, "shuffle": True}
kwargs.update({"num_workers": 0})
train_loader = DataLoader(TensorDataset(x), **kwargs)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(4):
    for (a,) in train_loader:
        optimizer.zero_grad()
        (model(a) - 1).square().mean().backward()
        optimizer.step()
final = (model(x) - 1).square().mean().item()
