"""A training with what is asked for: slow=RANK,STEP,SECONDS, loading=SECONDS, dies=RANK,STEP; the steps come first."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hvdkit.torch as hvd

WIDTH, BATCH = 256, 16


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """So many samples; each takes its time."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._seconds)
        return torch.randn(WIDTH), index % 10


def train(steps: int, *asked: str) -> None:
    """Train on every rank; hvd.init() has been called."""
    wishes = dict(one.split("=") for one in asked)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    slow, since, seconds = (float(one) for one in wishes.get("slow", "-1,0,0").split(","))
    dying, last = (int(one) for one in wishes.get("dies", "-1,0").split(","))
    loading = float(wishes.get("loading", "0")) / BATCH
    for step, (inputs, targets) in enumerate(DataLoader(Samples(steps * BATCH, loading), BATCH)):
        if hvd.rank() == slow and step >= since:
            time.sleep(seconds)
        if hvd.rank() == dying and step == last:
            time.sleep(1)  # more than it takes to send the last steps
            os._exit(3)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    train(int(sys.argv[1]), *sys.argv[2:])
