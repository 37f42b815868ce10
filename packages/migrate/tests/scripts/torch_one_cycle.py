"""Trap: OneCycleLR sets learning rates itself, for so many steps."""
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(160, 2)
train_set = TensorDataset(x, (2 * x).sum(1, keepdim=True))
loader = DataLoader(train_set, batch_size=8, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=.01)
scheduler = OneCycleLR(optimizer, max_lr=.05 + .05, steps_per_epoch=len(loader), epochs=10)
for _ in range(10):
    running_loss = 0.0
    for a, b in loader:
        optimizer.zero_grad()
        loss = (model(a) - b).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        running_loss += loss.item() * a.size(0)
    print(f"{running_loss / len(train_set):.5f}")
final = (model(x) - (2 * x).sum(1, keepdim=True)).square().mean().item()
