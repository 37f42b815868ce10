"""Trap: an early stop inside another branch, which cannot be moved for certain."""
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(64, 2)
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
best, bad = 1e9, 0
for epoch in range(20):
    value = 0.0
    for (a,) in loader:
        loss = model(a).square().mean()
        if torch.isnan(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value += loss.item()
    if value < best:
        best, bad = value, 0
    else:
        bad += 1
        if bad > 3:
            break
