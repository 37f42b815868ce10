"""A whole training step as each peer has it: no communication, hvdkit, torch DDP on Gloo, and with Horovod two more."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvdkit.torch as hvd
from hvdkit.tools.bench.figures import NO_COMMUNICATION, OURS
from hvdkit.tools.bench.horovod_job import HorovodJob
from hvdkit.tools.bench.models import MODELS, Model
from hvdkit.tools.bench.turns import Turn, time_each

Wrap = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]
Step = Callable[[], None]


def make_peers(model: Model, job: HorovodJob | None, *, alone: bool = False) -> dict[str, Turn]:
    """The turns of every peer, warmed up; collective. alone: without peers, only no communication and hvdkit."""
    peers = {
        NO_COMMUNICATION: _beside(model, lambda module, optimizer: (module, optimizer)),
        OURS: _beside(
            model, lambda module, optimizer: (module, hvd.DistributedOptimizer(optimizer, module.named_parameters()))
        ),
    }
    if not alone:
        wrap: Wrap = lambda module, optimizer: (nn.parallel.DistributedDataParallel(module), optimizer)  # noqa: E731
        peers["DDP (Gloo)"] = _beside(model, wrap)
    if job is not None:
        for name, function in (("hvdkit on Horovod", "time_on_horovod"), ("Horovod", "time_horovod")):
            call = functools.partial(job.call, f"{__name__}:{function}", model.name)
            peers[name] = functools.partial(_listed, call)
    for turn in peers.values():
        turn(3)
    return peers


def time_horovod(name: str, steps: int) -> list[float]:
    """Seconds of each step; called in a rank of Horovod. name: of the model."""
    return time_each(_horovod_step(name, False), _meet, steps)


def time_on_horovod(name: str, steps: int) -> list[float]:
    """The same with hvdkit's optimizer on Horovod's core."""
    return time_each(_horovod_step(name, True), _meet, steps)


def _beside(model: Model, wrap: Wrap) -> Turn:
    """A peer that lives in these processes."""
    step = make_step(model, wrap)
    return lambda steps: time_each(step, hvd.barrier, steps)


def _listed(call: Callable[[int], Any], steps: int) -> list[float]:
    return list(call(steps))


def make_step(model: Model, wrap: Wrap) -> Step:
    """A step of SGD on the model, with what `wrap` makes of module and optimizer."""
    torch.manual_seed(0)
    module, optimizer = wrap(plain := model.make(), torch.optim.SGD(plain.parameters(), lr=1e-4))
    inputs, targets = model.batch()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()

    return step


@functools.cache
def _horovod_step(name: str, ours: bool) -> Step:
    """A step on Horovod's core, with hvdkit's optimizer or with Horovod's own."""
    import horovod.torch as horovod

    if ours:
        hvd.init(engine="horovod")  # the core that is running already
    wrap = hvd.DistributedOptimizer if ours else horovod.DistributedOptimizer
    return make_step(
        next(model for model in MODELS if model.name == name),
        lambda module, optimizer: (module, wrap(optimizer, module.named_parameters())),
    )


def _meet() -> None:
    """Begin together: Horovod's own barrier lets ranks go up to a cycle apart."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
