"""The three models of the step-time benchmark, each with its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hvdkit.errors import BenchError


@dataclass(frozen=True)
class Model:
    """A model to train. make: builds it. batch: inputs and targets of one step."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers)


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
    layers: list[nn.Module] = []
    for _ in range(100):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


MODELS = (
    Model("MLP, 8 x 1024x1024", _mlp, lambda: (torch.randn(64, 1024), torch.randn(64, 1024))),
    Model("small conv net", _conv, lambda: (torch.randn(8, 3, 32, 32), torch.randn(8, 10))),
    Model("101 small layers", _small_layers, lambda: (torch.randn(32, 64), torch.randn(32, 10))),
)


def find_models(words: Sequence[str]) -> list[Model]:
    """The models whose names contain one of the words, in any case; all if there are none. BenchError if none does."""
    found = [model for model in MODELS if not words or any(word.lower() in model.name.lower() for word in words)]
    if not found:
        raise BenchError(
            f"No model is named like {' or '.join(words)}. There are: {'; '.join(model.name for model in MODELS)}."
        )
    return found
