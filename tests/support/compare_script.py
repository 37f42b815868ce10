"""A training for `hvdkit compare`, with mistakes that are planted by name: python compare_script.py [NAME ...]."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd

SAMPLES, BATCH = 103, 8


def train(planted: set[str]) -> None:
    """Two epochs of a small network on numbers of no meaning."""
    hvd.init()
    torch.manual_seed(hvd.rank() if "no-broadcast" in planted or "noise" in planted else 0)
    if "unseeded" in planted:
        torch.seed()
    numbers = np.random.RandomState(0)
    data = TensorDataset(
        torch.tensor(numbers.rand(SAMPLES, 6)).float(), torch.tensor(numbers.rand(SAMPLES, 1) > 0.5).float()
    )
    middle = nn.BatchNorm1d(16) if "batch-norm" in planted else nn.Dropout(0.3)
    model = nn.Sequential(nn.Linear(6, 16), middle, nn.Tanh(), nn.Linear(16, 1))
    rate = 0.1 * hvd.size() ** (2 if "rate-scaled-twice" in planted else 1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if "not-reduced" not in planted:
        op = hvd.Sum if "sum" in planted else hvd.Average
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=op)
    if "no-broadcast" not in planted:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    batch = BATCH // hvd.size() if "rate-scaled-for-nothing" in planted else BATCH
    rank = 0 if "same-samples" in planted else hvd.rank()
    sampler = hvd.data.ShardedSampler(data, rank=rank, size=hvd.size())
    loader = DataLoader(data, batch, sampler=sampler, drop_last="left-out" in planted and hvd.size() > 1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            if planted & {"noise", "unseeded"}:
                inputs = inputs + 0.3 * torch.randn_like(inputs)
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    train(set(sys.argv[1:]))
