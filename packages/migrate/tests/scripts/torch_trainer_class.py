"""Trap: model, optimizer and loader are attributes."""
import torch
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, x, epochs):
        self.model = torch.nn.Linear(2, 1)
        self.train_loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=.05)
        self.epochs = epochs

    def run_epoch(self, epoch):
        self.model.train()
        for (a,) in self.train_loader:
            self.optimizer.zero_grad()
            (self.model(a) + 1).square().mean().backward()
            self.optimizer.step()

    def fit(self):
        for e in range(self.epochs):
            self.run_epoch(e)
            print("epoch", e)


torch.manual_seed(0)
x = torch.rand(72, 2)
trainer = Trainer(x, 6)
trainer.fit()
model = trainer.model
final = (model(x) + 1).square().mean().item()
