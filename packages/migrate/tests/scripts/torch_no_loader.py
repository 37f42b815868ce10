"""Trap: batches are cut by hand, so every rank would train on the same samples."""
import numpy as np
import torch

x = torch.rand(80, 2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(4):
    order = np.random.permutation(80)
    for i in range(0, 80, 8):
        a = x[order[i:i + 8]]
        optimizer.zero_grad()
        model(a).square().mean().backward()
        optimizer.step()
