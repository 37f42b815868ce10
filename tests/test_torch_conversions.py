"""Parameters that are converted after the first step: another memory format changes no number, the rest is refused."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from hvdrun_job import hvdrun
from ranks import run_ranks
from torch import nn
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.torch.conversions import PlannedMetadata

_OPTIONS = {"SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 0.01}}
_EVERYWHERE = range(3)


def _wrap(model: nn.Module, name: str, form: str = "DistributedOptimizer", **arguments: Any) -> Any:
    plain = _plain(model, name)
    return getattr(hvd, form)(plain, model.named_parameters(), **arguments)


def _plain(model: nn.Module, name: str) -> torch.optim.Optimizer:
    kind: Any = getattr(torch.optim, name)
    made: torch.optim.Optimizer = kind(model.parameters(), **_OPTIONS[name])
    return made


def _make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 5, 3), nn.Flatten(), nn.Linear(5 * 16, 3))
    model[2].bias.requires_grad_(False)
    return model.double()


def _step(model: Any, optimizer: Any, step: int, ranks: range) -> None:
    inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step)).double()
    mine = torch.cat([inputs[2 * rank : 2 * rank + 2] for rank in ranks])
    optimizer.zero_grad()
    model(mine).square().mean().backward()
    optimizer.step()


def _last(model: nn.Module) -> None:
    """Convert to channels last, and one square matrix to its transpose without any other memory."""
    model.to(memory_format=torch.channels_last)
    square = next(each for each in model.parameters() if each.dim() == 2)
    square.data = square.data.t().contiguous().t()


def _differences(name: str, shard: str | None, where: range) -> list[float]:
    """From one process, of parameters and of the state, with a conversion on some ranks between the steps."""
    with joined(check_replicas=1, fusion_bytes=512):
        model, alone = _make(), _make()
        optimizer, plain = _wrap(model, name, shard=shard), _plain(alone, name)
        found = []
        for step in range(5):
            if step == 3 and where == _EVERYWHERE:  # the parameters are divided anew
                model[2].bias.requires_grad_(True)
                alone[2].bias.requires_grad_(True)
            _step(model, optimizer, step, range(hvd.rank(), hvd.rank() + 1))
            _step(alone, plain, step, range(hvd.size()))
            if step == 1 and hvd.rank() in where:
                optimizer.zero_grad()
                _last(model)
            if step in (1, 2, 4):
                found += _differences_of_states(optimizer.state_dict()["state"], plain.state_dict()["state"])
        return found + [
            float((one - two).abs().max()) for one, two in zip(model.parameters(), alone.parameters(), strict=True)
        ]


def _differences_of_states(state: dict[int, Any], expected: dict[int, Any]) -> list[float]:
    assert sorted(state) == sorted(expected)
    return [
        float((state[number][name] - value).abs().max())
        for number, entries in expected.items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("where", [_EVERYWHERE, range(1, 2)], ids=["everywhere", "on one rank"])
@pytest.mark.parametrize("name", list(_OPTIONS))
@pytest.mark.parametrize("shard", [None, "optimizer", "gradients"])
def test_another_memory_format_changes_no_number(shard: str | None, name: str, where: range) -> None:
    for found in run_ranks(3, _differences, name, shard, where):
        assert max(found) < 1e-10
