"""Trap: learning rates of their own for parts of a model, and a list of parameters in between."""
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(72, 2)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
for p in model[0].parameters():
    p.requires_grad = False
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.Adam([{"params": params[:2], "lr": .01}, {"params": params[2:]}])
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
for epoch in range(3):
    for (a,) in loader:
        optimizer.zero_grad()
        (model(a) - 1).square().mean().backward()
        optimizer.step()
model.eval()
model = torch.nn.ParameterList(model.parameters())  # running statistics are each rank's own
final = 0.0
