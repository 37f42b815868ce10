"""Trap: a sampler of the script's own, and loaders made in a comprehension."""
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

data = TensorDataset(torch.rand(64, 2))
sampler = WeightedRandomSampler(torch.ones(64), 64)
loader = DataLoader(data, batch_size=8, sampler=sampler)
sets = {"train": data, "val": data}
loaders = {phase: DataLoader(sets[phase], batch_size=8, shuffle=True) for phase in ["train", "val"]}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
for phase in ["train", "val"]:
    for (a,) in loaders[phase]:
        optimizer.zero_grad()
        loss = model(a).square().mean()
        if phase == "train":
            loss.backward()
            optimizer.step()
for (a,) in loader:
    model(a).square().mean().backward()
    optimizer.step()
