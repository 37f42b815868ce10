"""Trap: a function sets the learning rate itself, and loops do not count epochs."""
import torch
from torch.utils.data import DataLoader, TensorDataset


def adjust_learning_rate(optimizer, step):
    lr = 0.1 * 0.5 ** (step // 4)
    for param_group in optimizer.param_groups:
        param_group['lr'] = lr


torch.manual_seed(0)
x = torch.rand(72, 2)
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
step = 0
while step < 6:
    adjust_learning_rate(optimizer, step)
    for (a,) in loader:
        optimizer.zero_grad()
        (model(a) + 1).square().mean().backward()
        optimizer.step()
    step += 1
final = (model(x) + 1).square().mean().item()
