"""Trainings drawn from a seed: layers are frozen, branches left out, steps skipped, gradients cleared in any way.

The reference is one process that computes the batches of all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hvdkit.torch as hvd

_LAYERS = ("table", "first", "second", "third")


class Branches(nn.Module):
    """A model of which a batch may use a part; two of its layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.first, self.second, self.third = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 5)
        self.last, self.other = nn.Linear(5, 2), nn.Linear(5, 2)
        self.other.weight = self.last.weight

    def forward(self, rows: torch.Tensor, used: str) -> torch.Tensor:
        """used: the letters of the branches."""
        hidden = self.table(rows)
        hidden = sum(layer(hidden) for name, layer in (("a", self.first), ("b", self.second)) if name in used)
        hidden = self.third(torch.tanh(hidden)) if "c" in used else hidden
        result: torch.Tensor = self.last(hidden)
        return result + self.other(hidden) if "d" in used else result


@dataclass(frozen=True)
class Form:
    """passes: backward passes of a step. shard: of the optimizer. simple: no skipped steps, and zero_grad() only."""

    passes: int = 1
    shard: str | None = None
    simple: bool = False


def _by_hand(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _in_place(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


CLEARINGS: dict[str, Callable[[nn.Module, Any], object]] = {
    "grad = None": _by_hand,
    "grad.zero_()": _in_place,
    "model.zero_grad(set_to_none=False)": lambda model, _: model.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda model, _: model.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "optimizer.zero_grad()": lambda _, optimizer: optimizer.zero_grad(),
}


def train(form: Form, seed: int) -> str:
    """Train as the seed draws it; returns "" or the history up to the first difference from one process."""
    drawn, history = random.Random(seed), []
    torch.manual_seed(seed)
    model, alone = Branches().double(), Branches().double()
    alone.load_state_dict(model.state_dict())
    make = drawn.choice([_sgd, _adam])
    wrapped = hvd.DistributedOptimizer(
        make(model), model.named_parameters(), backward_passes_per_step=form.passes, shard=form.shard
    )
    both = ((model, wrapped), (alone, make(alone)))

    def clear(how: str) -> None:
        history.append(how)
        for each, optimizer in both:
            CLEARINGS[how](each, optimizer)

    for step in range(8):
        if drawn.random() < 0.3:
            layer, trained = drawn.choice(_LAYERS), drawn.random() < 0.5
            history.append(f"{layer}.requires_grad_({trained})")
            for each, _ in both:
                getattr(each, layer).requires_grad_(trained)
        for one in range(form.passes if form.simple else drawn.choice([1, form.passes, form.passes, 2, 0])):
            used = [drawn.choice(["a", "ab", "abc", "ad", "abcd", "b"]) for _ in range(hvd.size())]
            history.append(f"backward {used}")
            for rank in range(hvd.size()):
                rows = torch.randint(
                    7, (3,), generator=torch.Generator().manual_seed(1000 * seed + 10 * step + one + 100 * rank)
                )
                (alone(rows, used[rank]).square().sum() / hvd.size()).backward()
                if rank == hvd.rank():
                    model(rows, used[rank]).square().sum().backward()
            if not form.simple and drawn.random() < 0.15:
                clear(drawn.choice(list(CLEARINGS)))
        if form.simple or drawn.random() < 0.8:
            history.append("step")
            for _, optimizer in both:
                optimizer.step()
        if form.simple or drawn.random() < 0.9:
            clear("optimizer.zero_grad()" if form.simple else drawn.choice(list(CLEARINGS)))
        different = [
            name
            for (name, here), there in zip(model.named_parameters(), alone.parameters(), strict=True)
            if not torch.allclose(here, there, rtol=1e-9, atol=1e-9)
        ]
        if any(hvd.allgather_object(different)):
            return f"seed {seed}: {different} differ after {'; '.join(history)}"
    return ""


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
