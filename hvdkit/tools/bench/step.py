"""A training step of a model as each peer runs it: no communication, hvdkit, and torch DDP on Gloo or NCCL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import hvdkit.torch as hvd
from hvdkit.tools.bench.gpus import MemoryUse, find_clock
from hvdkit.tools.bench.models import CPU_MODELS, GPU_MODELS, Model
from hvdkit.tools.bench.plan import CPU, CUDA, LIBRARIES, NO_COMMUNICATION, OURS, select_models
from hvdkit.tools.bench.timing import Turn, time_each, time_in_a_row

Wrap = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]
Step = Callable[[], None]

_MODELS = {CPU: CPU_MODELS, CUDA: GPU_MODELS}
WARM_UP = 3


def find_models(words: Sequence[str], device: str = CPU) -> list[Model]:
    """Return the device's models whose names contain one of the words; all without words. BenchError for none."""
    names = select_models(words, device)
    return [model for model in _MODELS[device] if model.name in names]


class StepPeers:
    """Every peer that trains the model, as turns, warmed up; made by all ranks together.

    alone: only no communication and hvdkit. memory: bytes of GPU memory that each peer takes; empty on the CPU.
    """

    def __init__(self, model: Model, *, device: str = CPU, alone: bool = False) -> None:
        self.turns: dict[str, Turn] = {}
        self.memory: dict[str, int] = {}
        wraps: dict[str, Wrap] = {NO_COMMUNICATION: _keep, OURS: _use_hvdkit}
        if not alone:
            wraps[f"DDP ({LIBRARIES[device]})"] = _use_ddp
        if device != CPU:  # kernels and workspaces of the process belong to no peer
            make_turn(model, _keep, device)(1)
        for name, wrap in wraps.items():
            memory = MemoryUse(device)
            self.turns[name] = make_turn(model, wrap, device)
            self.turns[name](WARM_UP)
            if device != CPU:
                self.memory[name] = memory.used()


def make_turn(model: Model, wrap: Wrap, device: str) -> Turn:
    """Make the turn of a peer: on the CPU every step is timed, on a GPU all in a row, as a loop of steps runs there."""
    time_steps = time_each if device == CPU else time_in_a_row
    return functools.partial(_time, time_steps, make_step(model, wrap, device), device)


def _time(time_steps: Callable[..., list[float]], step: Step, device: str, count: int) -> list[float]:
    return time_steps(step, hvd.barrier, count, find_clock(device))


def make_step(model: Model, wrap: Wrap, device: str = CPU) -> Step:
    """Make a step of SGD on the model. wrap: turns module and optimizer into those that are trained with."""
    torch.manual_seed(0)
    plain = model.make().to(device)
    module, optimizer = wrap(plain, torch.optim.SGD(plain.parameters(), lr=1e-4))
    inputs, targets = (tensor.to(device) for tensor in model.batch())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=model.bfloat16):
            loss = model.loss(module(inputs), targets)
        loss.backward()
        optimizer.step()

    return step


def _keep(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    return module, optimizer


def _use_hvdkit(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    return module, hvd.DistributedOptimizer(optimizer, module.named_parameters())


def _use_ddp(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    return nn.parallel.DistributedDataParallel(module), optimizer
