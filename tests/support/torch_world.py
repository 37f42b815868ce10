"""Bodies for ranks that train with torch: a world of a wished transport, and one training with and without ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from openers import OPENERS
from torch import nn

import hvdkit.torch as hvd
from hvdkit.config import Config
from hvdkit.engine import runtime as engine
from hvdkit.torch.tensors import TorchArithmetic
from hvdkit.transport.api import Transport
from hvdkit.transport.select import Connection, open_transport
from hvdkit.world import World

Weights = list[NDArray[np.float64]]


@contextmanager
def joined(transport: str = "auto", **settings: Any) -> Iterator[None]:
    """Between init() and shutdown(). transport: a name of Config's or, for simulated hosts, of OPENERS."""
    torch.set_num_threads(1)
    hvd.shutdown()  # what a test before has left open would keep its settings
    if os.environ.get("HVDKIT_ENGINE") == "horovod":
        transport = "auto"  # it has its own
    if transport.startswith("hierarchical_"):

        def opener(config: Config, connection: Connection) -> tuple[World, Transport]:
            world, first = open_transport(config, connection)
            first.close()
            return world, OPENERS[transport]()

        engine.init(arithmetic=TorchArithmetic(), opener=opener, transport="mpi", **settings)
    else:
        hvd.init(transport=transport, **settings)
    yield
    hvd.shutdown()


@dataclass(frozen=True)
class Case:
    """A training run. rows: samples of a rank in a pass; passes: backward passes in a step; hidden: a width."""

    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05, "momentum": 0.9})
    dtype: str = "float64"
    bias: bool = True
    hidden: int = 20
    steps: int = 20
    rows: int = 3
    passes: int = 1
    clip: float = 0.0
    autocast: bool = False
    infinite_at: int = -1
    set_to_none: bool = True

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and its optimizer, always the same."""
        torch.manual_seed(1)
        first, last = nn.Linear(12, self.hidden, bias=self.bias), nn.Linear(self.hidden, 5, bias=self.bias)
        layers = [first, nn.Tanh(), last]
        model = nn.Sequential(*layers).to(getattr(torch, self.dtype))
        return model, getattr(torch.optim, self.optimizer)(model.parameters(), **self.options)

    def batch(self, step: int, window: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole batch of a pass."""
        generator = torch.Generator().manual_seed(1000 * step + window)
        dtype = getattr(torch, self.dtype)
        inputs = torch.randn(size * self.rows, 12, generator=generator, dtype=torch.float64)
        targets = torch.randn(size * self.rows, 5, generator=generator, dtype=torch.float64)
        return inputs.to(dtype), targets.to(dtype)


def weights(model: nn.Module) -> Weights:
    """The parameters as float64 arrays."""
    return [parameter.detach().double().numpy().copy() for parameter in model.parameters()]


def train(case: Case, model: nn.Module, optimizer: Any, *, rank: int, of: int, size: int, how: str = "") -> Weights:
    """Train on the part `rank` of `of` of each batch of `size` ranks.

    how: "" lets step() do it all; "synchronize" does as Horovod's documentation says.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5) if case.autocast else None
    rows = size * case.rows // of
    for step in range(case.steps):
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for window in range(case.passes):
            inputs, targets = case.batch(step, window, size)
            mine = slice(rank * rows, (rank + 1) * rows)
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
            if step == case.infinite_at and rank == 0:
                loss = loss * float("inf")
            (scaler.scale(loss) if scaler else loss).backward()
        if how == "synchronize":
            optimizer.synchronize()
        if scaler:
            scaler.unscale_(optimizer)
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        if how == "synchronize":
            with optimizer.skip_synchronize():
                scaler.step(optimizer) if scaler else optimizer.step()
        else:
            scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
    return weights(model)


def train_here(case: Case, size: int) -> Weights:
    """The reference: one process with the whole batch."""
    torch.set_num_threads(1)
    model, optimizer = case.make()
    return train(case, model, optimizer, rank=0, of=1, size=size)


def train_on_ranks(
    case: Case, transport: str, settings: dict[str, Any], how: str = "", compression: str = "none", **options: Any
) -> Weights:
    """One rank of the same training."""
    with joined(transport, **settings):
        model, plain = case.make()
        if hvd.rank() > 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            plain,
            model.named_parameters(),
            compression=getattr(hvd.Compression, compression),
            backward_passes_per_step=case.passes,
            **options,
        )
        return train(case, model, optimizer, rank=hvd.rank(), of=hvd.size(), size=hvd.size(), how=how)


def assert_alike(results: list[Weights], expected: Weights, tolerance: float) -> None:
    """All ranks ended with the same parameters, and those are the reference's."""
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)
    for one, two in zip(results[0], expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=tolerance)
