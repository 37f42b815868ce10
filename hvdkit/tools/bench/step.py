"""A training step of three models as each peer runs it: no communication, hvdkit, and torch DDP on Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hvdkit.torch as hvd
from hvdkit.tools.bench import plan
from hvdkit.tools.bench.interleave import Turn, time_each
from hvdkit.tools.bench.plan import NO_COMMUNICATION, OURS, select_models

Wrap = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]
Step = Callable[[], None]


@dataclass(frozen=True)
class Model:
    """A model to train. make: builds it. batch: makes inputs and targets of one step."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


def _mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())))


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 8 * 8, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def _small_layers() -> nn.Module:
    layers = (layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.ReLU()))
    return nn.Sequential(*layers, nn.Linear(64, 10))


_MLP, _CONV, _SMALL_LAYERS = plan.MODELS
MODELS = (
    Model(_MLP, _mlp, lambda: (torch.randn(64, 1024), torch.randn(64, 1024))),
    Model(_CONV, _conv, lambda: (torch.randn(8, 3, 32, 32), torch.randn(8, 10))),
    Model(_SMALL_LAYERS, _small_layers, lambda: (torch.randn(32, 64), torch.randn(32, 10))),
)


def find_models(words: Sequence[str]) -> list[Model]:
    """Return the models whose names contain one of the words; all without words. BenchError for none."""
    names = select_models(words)
    return [model for model in MODELS if model.name in names]


def make_peers(model: Model, *, alone: bool = False) -> dict[str, Turn]:
    """Make the turns of every peer, warmed up; collective. alone: only no communication and hvdkit."""
    wraps: dict[str, Wrap] = {
        NO_COMMUNICATION: lambda module, optimizer: (module, optimizer),
        OURS: lambda module, optimizer: (module, hvd.DistributedOptimizer(optimizer, module.named_parameters())),
    }
    if not alone:
        wraps["DDP (Gloo)"] = lambda module, optimizer: (nn.parallel.DistributedDataParallel(module), optimizer)
    turns = {name: _make_turn(model, wrap) for name, wrap in wraps.items()}
    for turn in turns.values():
        turn(3)
    return turns


def _make_turn(model: Model, wrap: Wrap) -> Turn:
    step = make_step(model, wrap)
    return lambda steps: time_each(step, hvd.barrier, steps)


def make_step(model: Model, wrap: Wrap) -> Step:
    """Make a step of SGD on the model. wrap: turns module and optimizer into those that are trained with."""
    torch.manual_seed(0)
    module, optimizer = wrap(plain := model.make(), torch.optim.SGD(plain.parameters(), lr=1e-4))
    inputs, targets = model.batch()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()

    return step
