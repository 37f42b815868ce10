"""Trap: a split that is different on every rank, and datasets made inside the call."""
import os
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

x = torch.linspace(-1, 1, 240).view(-1, 1)
full = TensorDataset(x, 3 * x)
n = int(len(full) * .8)
train_set, val_set = random_split(full, [n, len(full) - n])
loaders = {
    "train": DataLoader(train_set, batch_size=8, shuffle=True),
    "val": DataLoader(val_set, batch_size=8, shuffle=False),
}
extra = DataLoader(
    TensorDataset(x, 3 * x),   # made here
    batch_size=8,
    shuffle=True,
)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=.05)
if not os.path.isdir("logs"):
    os.mkdir("logs")
for epoch in range(3):
    for a, b in loaders["train"]:
        optimizer.zero_grad()
        ((model(a) - b) ** 2).mean().backward()
        optimizer.step()
for a, b in extra:
    optimizer.zero_grad()
    ((model(a) - b) ** 2).mean().backward()
    optimizer.step()
final = ((model(x) - 3 * x) ** 2).mean().item()
