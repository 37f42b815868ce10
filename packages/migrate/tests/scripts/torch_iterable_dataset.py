"""Trap: an IterableDataset has no indices to share out."""
import torch
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(64):
            yield torch.rand(2, generator=generator)


loader = DataLoader(Stream(), batch_size=8)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
for a in loader:
    optimizer.zero_grad()
    model(a).square().mean().backward()
    optimizer.step()
