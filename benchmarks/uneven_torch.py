"""The training of benchmarks.uneven in PyTorch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd


class Training:
    """See benchmarks.uneven.Training."""

    def __init__(self, batch: int, row_s: float, every: int) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self._row_s = row_s
        self._model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._optimizer: Any = hvd.DistributedOptimizer(optimizer, self._model.named_parameters())
        data = TensorDataset(torch.randn(batch * 50, 64))
        self._sampler = hvd.data.BalancedSampler(data, batch, self._optimizer, every=every)
        self._batches = self._endless(DataLoader(data, batch_sampler=self._sampler))

    @property
    def plan(self) -> tuple[int, ...]:
        return self._sampler.plan

    def _endless(self, loader: DataLoader[Any]) -> Iterator[torch.Tensor]:
        while True:
            for (rows,) in loader:
                yield rows

    def steps(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            rows = next(self._batches)
            time.sleep(self._row_s * len(rows))
            self._optimizer.zero_grad()
            self._model(rows).square().mean().backward()
            self._optimizer.step()
            times.append(time.perf_counter() - began)
        return times
