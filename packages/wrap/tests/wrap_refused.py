"""Each thing that --wrap refuses, in turn, with what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hvdkit.errors import WrapError


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(3)


model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(8, 3))


def by_hand() -> None:
    other = torch.nn.Linear(3, 1)
    stepping = torch.optim.SGD(other.parameters(), lr=0.1)
    for (x,) in DataLoader(data, batch_size=4):
        for parameter, gradient in zip(
            other.parameters(), torch.autograd.grad(other(x).mean(), list(other.parameters())), strict=True
        ):
            parameter.grad = gradient
        stepping.step()


def mean_and_sum() -> None:
    for (x,) in DataLoader(data, batch_size=4):
        (model(x).mean() + model(x).sum()).backward()


def sum_and_penalty() -> None:
    for (x,) in DataLoader(data, batch_size=4):
        (model(x).sum() + model.weight.norm()).backward()


def without_training() -> None:
    for (x,) in DataLoader(data, batch_size=4):
        model(x)


def hvdkits_own() -> None:
    import hvdkit.torch as hvd

    hvd.init()


def horovods_own() -> None:
    import horovod.torch  # noqa: F401


def distributed() -> None:
    torch.distributed.init_process_group("gloo")


TRIES: list[Callable[[], Any]] = [
    lambda: next(iter(DataLoader(Endless(), batch_size=2))),
    lambda: next(iter(DataLoader(data, batch_size=None))),
    lambda: torch.nn.parallel.DistributedDataParallel(model),
    distributed,
    hvdkits_own,
    horovods_own,
    mean_and_sum,
    sum_and_penalty,
    by_hand,
    without_training,
]
for attempt in TRIES:
    try:
        attempt()
        print("nothing was refused")
    except WrapError as error:  # noqa: PERF203
        print(error)

# A child is no rank: it prints, and it is alone.
child = "import torch, sys; print('child', 'hvdkit_wrap' in sys.modules, flush=True)"
subprocess.run([sys.executable, "-c", child], check=True)
print("environment", os.environ["HVDKIT_WRAP"])
