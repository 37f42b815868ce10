"""The models that are trained on CPUs: one of large layers, one of convolutions, one of many small layers."""

from __future__ import annotations

import torch
from torch import nn

from hvdkit.tools.bench import plan
from hvdkit.tools.bench.model import Model


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


_MLP, _CONV, _SMALL_LAYERS = plan.MODELS[plan.CPU]
MODELS = (
    Model(_MLP, _mlp, lambda: (torch.randn(64, 1024), torch.randn(64, 1024))),
    Model(_CONV, _conv, lambda: (torch.randn(8, 3, 32, 32), torch.randn(8, 10))),
    Model(_SMALL_LAYERS, _small_layers, lambda: (torch.randn(32, 64), torch.randn(32, 10))),
)
