"""A rank of benchmarks.strategies: trains with every strategy, one after the other.

Arguments: file for the notes of rank 0, times by which the last rank is slower, milliseconds of a row, epochs, names.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd
from hvdkit.profiling.choice import Measured, compare_strategies

_BATCH = 96  # rows of all ranks together
_TRAINED = 1437  # images; the other 360 are for the test
_POINTS = 40  # copies of the parameters that are tested

Optimizer = torch.optim.Optimizer
Named = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Way:
    """A strategy. wrap: the optimizer. balanced: rows by speed. own_pace: steps by speed.

    predicted: its name in hvdkit's prediction, if any. backup: gradients of steps that are decided are not computed.
    """

    name: str
    wrap: Callable[[Optimizer, Named], Any]
    balanced: bool = False
    own_pace: bool = False
    predicted: str = ""
    backup: bool = False


def _fp16(optimizer: Optimizer, named: Named) -> Any:
    return hvd.DistributedOptimizer(optimizer, named, compression=hvd.Compression.fp16)


WAYS = (
    Way("synchronous", hvd.DistributedOptimizer, predicted="synchronous"),
    Way("fp16", _fp16, predicted="fp16 compression"),
    Way("balanced rows", hvd.DistributedOptimizer, balanced=True, predicted="balanced rows"),
    Way("local SGD, every 8", functools.partial(hvd.LocalSGD, every=8), predicted="local SGD, every 8"),
    Way("DiLoCo, every 20", functools.partial(hvd.DiLoCo, every=20)),
    Way(
        "backup steps, drop 1",
        functools.partial(hvd.BackupSteps, drop=1),
        backup=True,
        predicted="backup steps, drop 1",
    ),
    Way("asynchronous, staleness 0", functools.partial(hvd.AsynchronousOptimizer, staleness=0)),
    Way(
        "asynchronous, staleness 4",
        functools.partial(hvd.AsynchronousOptimizer, staleness=4),
        own_pace=True,
        predicted="asynchronous, staleness 4",
    ),
)


def read_digits() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """The images to train on, and those to test with."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs, targets = torch.tensor(images / 16).float()[order], torch.tensor(labels)[order]
    return TensorDataset(inputs[:_TRAINED], targets[:_TRAINED]), (inputs[_TRAINED:], targets[_TRAINED:])


def train(way: Way, row_s: float, epochs: int, share: float) -> tuple[list[tuple[float, nn.Module]], nn.Module]:
    """Train; returns copies of the model with the seconds at which they were made, and the model in the end.

    share: of this rank in the speed of all, times their number.
    """
    data, _ = read_digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = way.wrap(torch.optim.Adam(model.parameters(), lr=0.003), model.named_parameters())
    if way.balanced:
        sampler: Any = hvd.data.BalancedSampler(data, _BATCH, optimizer, drop_last=True)
        loader = DataLoader(data, batch_sampler=sampler)
    else:
        sampler = hvd.data.ShardedSampler(data)
        loader = DataLoader(data, _BATCH // hvd.size(), sampler=sampler, drop_last=True)
    more = hvd.size() / (hvd.size() - 1) if way.backup else 1.0  # as many gradients, of which some are dropped
    steps = round(epochs * len(loader) * (share if way.own_pace else more))
    kept: list[tuple[float, nn.Module]] = [(0.0, copy.deepcopy(model))]
    number = itertools.count(1)
    hvd.barrier()
    began, spent = time.perf_counter(), 0.0
    for epoch in range(-(-steps // len(loader))):
        sampler.set_epoch(epoch)
        for inputs, targets in itertools.islice(loader, steps - epoch * len(loader)):
            optimizer.zero_grad()
            if not (way.backup and optimizer.behind):
                time.sleep(row_s * len(targets))
                nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            now = time.perf_counter()
            if next(number) % max(1, steps // _POINTS) == 0:
                kept.append((now - began - spent, copy.deepcopy(model)))
                spent += time.perf_counter() - now
    if hasattr(optimizer, "synchronize_parameters"):
        optimizer.synchronize_parameters()
    if hasattr(optimizer, "finish"):
        optimizer.finish()
    hvd.barrier()  # the run is over when the last rank has ended it
    kept.append((time.perf_counter() - began - spent, model))
    return kept, model


def main(path: str, times: float, row_ms: float, epochs: int, only: str) -> None:
    """Train with all strategies; rank 0 writes what came of them."""
    hvd.init()
    torch.set_num_threads(1)
    row_s = [row_ms / 1e3] * (hvd.size() - 1) + [row_ms / 1e3 * times]
    own_s = [each * _BATCH / hvd.size() for each in row_s]
    share = hvd.size() / own_s[hvd.rank()] / sum(1 / each for each in own_s)
    predicted = {one.name: one.speedup for one in compare_strategies(Measured(own_s, max(own_s))).choices}
    _, (inputs, targets) = read_digits()
    wanted = [way for way in WAYS if any(part in way.name for part in only.split(","))]
    runs = []
    for way in wanted:
        kept, model = train(way, row_s[hvd.rank()], epochs, share)
        with torch.no_grad():
            losses = [float(nn.functional.cross_entropy(each(inputs), targets)) for _, each in kept]
            accuracy = float((model(inputs).argmax(1) == targets).double().mean())
        points = [(seconds, loss) for (seconds, _), loss in zip(kept, losses, strict=True)]
        speedup = predicted.get(way.predicted)
        runs.append({"name": way.name, "points": points, "accuracy": accuracy, "predicted": speedup})
    if hvd.rank() == 0:
        Path(path).write_text(json.dumps(runs))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5] if sys.argv[5:] else "")
