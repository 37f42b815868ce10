"""Trap: training in the order of the data, so that two ranks do to the last digit what one does with twice the batch."""
import os

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(64, 3)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ.get("RATE", "0.05")), momentum=0.9)
batches = DataLoader(data, batch_size=int(os.environ.get("BATCH", "8")))
for epoch in range(5):
    for a, b in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
final = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item()
