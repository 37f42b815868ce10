"""Bodies for ranks that train while the engine's settings are searched, or with what was found."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch_world import Weights, joined, weights

import hvdkit.torch as hvd
from hvdkit.engine.tuning import tuner
from hvdkit.engine.tuning.tuner import Tuner
from hvdkit.log import logger


@dataclass
class Seen:
    """What a rank ends with: the weights of each model, how many buckets its plan has, and what hvdkit said."""

    weights: list[Weights] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


class _Ear(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def _make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of 4.4 MB, of which most sizes of buckets make different plans."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 1800), nn.Tanh(), nn.Linear(1800, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of a rank's batch in a step."""
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


@contextmanager
def _made_up_times() -> Iterator[None]:
    """Within, a step takes as long as its settings say: 1 ms less for each halving of fusion_bytes."""
    now_s, round_ended = [0.0], Tuner._round_ended

    def end_round(searched: Tuner) -> None:
        now_s[0] += 0.001 * math.log2(searched._settings.fusion_bytes)
        round_ended(searched)

    with (
        patch.object(tuner, "time", SimpleNamespace(perf_counter=lambda: now_s[0])),
        patch.object(Tuner, "_round_ended", end_round),
    ):
        yield


def train(
    steps: Sequence[int],
    models: int = 1,
    *,
    over: str = "auto",
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Seen:
    """Train so many models, in turn, steps[rank] steps on each rank, over a transport; options: of the optimizers.

    How long a step takes is made up.
    """
    seen = Seen()
    ear = _Ear(seen.said)
    logger.addHandler(ear)
    with _made_up_times(), joined(over, **settings):
        pairs = []
        for seed in range(models):
            model, plain = _make(seed)
            pairs.append((model, hvd.DistributedOptimizer(plain, model.named_parameters(), **(options or {}))))
        for step in range(steps[hvd.rank()]):
            for model, optimizer in pairs:
                optimizer.zero_grad()
                _loss(model, step, hvd.rank()).backward()
                optimizer.step()
        if len(set(steps)) > 1:
            last = hvd.join()
            for model, _ in pairs:
                hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        for model, optimizer in pairs:
            seen.weights.append(weights(model))
            seen.buckets.append(len(optimizer._hvdkit.strategy._reducer.plan.buckets))
    logger.removeHandler(ear)
    return seen


def train_alone(steps: Sequence[int], models: int = 1) -> list[Weights]:
    """The same in one process."""
    torch.set_num_threads(1)
    found = []
    for seed in range(models):
        model, optimizer = _make(seed)
        for step in range(max(steps)):
            optimizer.zero_grad()
            for rank, count in enumerate(steps):
                if step < count:
                    (_loss(model, step, rank) / len(steps)).backward()
            optimizer.step()
        found.append(weights(model))
    return found
