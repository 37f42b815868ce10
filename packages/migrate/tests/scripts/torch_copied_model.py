"""Trap: a copy of the model is made before the ranks are equal."""
import copy
import torch
from torch.utils.data import DataLoader, TensorDataset

x = torch.rand(72, 2, generator=torch.Generator().manual_seed(0))
online = torch.nn.Linear(2, 1)
target = copy.deepcopy(online)
average = torch.nn.Linear(2, 1)
average.load_state_dict(online.state_dict())
optimizer = torch.optim.SGD(online.parameters(), lr=.1)
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
for epoch in range(3):
    for (a,) in loader:
        optimizer.zero_grad()
        (online(a) - target(a).detach() - 1).square().mean().backward()
        optimizer.step()
model = torch.nn.ModuleList([online, target, average])
final = 0.0
