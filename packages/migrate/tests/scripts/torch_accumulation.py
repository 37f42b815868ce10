"""Trap: a step after so many backward passes."""
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(100, 2)
loader = DataLoader(TensorDataset(x), batch_size=4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(.1), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=.05)
windows = 3
for epoch in range(4):
    optimizer.zero_grad()
    for i, (a,) in enumerate(loader):
        loss = (model(a) - 1).square().mean() / windows
        loss.backward()
        if (i + 1) % windows == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
model.eval()
final = (model(x) - 1).square().mean().item()
