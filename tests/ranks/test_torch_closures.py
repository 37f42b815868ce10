"""Optimizers that decide by the loss of a closure, of which each rank has a part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from averaging import LateAverage
from ranks import run_ranks
from torch import nn
from torch_world import joined, weights

import hvdkit.torch as hvd
from hvdkit.strategies.backup_steps import BackupSteps

RANKS, ROWS = 3, 60


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def _batch(rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    return x[rows], torch.tanh(x.sum(1, keepdim=True) / 2)[rows] + 0.3 * noise[rows]


class ByLoss(torch.optim.Optimizer):
    """Steps as far as the loss is large; treats every element by itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = 1.0
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * (0.5 if loss is None else float(loss)))
        return loss


class ByBackward(ByLoss):
    """The same, of a closure that leaves backward() to the optimizer."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        self.zero_grad()
        loss = closure()
        loss.backward()
        return super().step(lambda: loss.detach())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.5),
    "line search": lambda params: torch.optim.LBFGS(params, line_search_fn="strong_wolfe"),
    "ByLoss": ByLoss,
    "ByBackward": ByBackward,
}


def _train(
    kind: str, rows: slice, *, sums: bool = False, passes: int = 1, wrap: Callable[[Any, Any], Any] | None = None
) -> tuple[list[Any], int, list[float]]:
    """Weights, evaluations and losses of training on these rows."""
    model = _model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    if wrap is not None:
        optimizer = wrap(optimizer, model)
    x, y = _batch(rows)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if kind == "ByBackward":
            return nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part, wanted in zip(x.chunk(passes), y.chunk(passes), strict=True):
            loss = nn.functional.mse_loss(model(part), wanted, reduction="sum" if sums else "mean")
            (loss / ROWS if sums else loss).backward()
            total += (loss / ROWS if sums else loss).detach()
        return total

    losses = [float(optimizer.step(closure)) for _ in range(6)]  # type: ignore[arg-type]
    return weights(model), calls, losses


def _on_ranks(kind: str, options: dict[str, Any], some: bool, sums: bool, passes: int) -> Any:
    with joined():
        members = [0, 2] if some else [*range(hvd.size())]
        process_set = hvd.add_process_set(members) if some else hvd.global_process_set
        if hvd.rank() not in members:
            return None

        def wrap(optimizer: Any, model: nn.Module) -> Any:
            return hvd.DistributedOptimizer(
                optimizer, model.named_parameters(), process_set=process_set, backward_passes_per_step=passes, **options
            )

        rows = slice(members.index(hvd.rank()), None, len(members))
        return _train(kind, rows, sums=sums, passes=passes, wrap=wrap)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LBFGS": ("LBFGS", {}),
    "line search": ("line search", {}),
    "line search, some ranks": ("line search", {}),
    "line search, sum": ("line search", {"op": hvd.Sum}),
    "ByLoss": ("ByLoss", {}),
    "ByLoss, two passes": ("ByLoss", {}),
    "ByLoss, sum": ("ByLoss", {"op": hvd.Sum}),
    "ByLoss, sharded": ("ByLoss", {"shard": "optimizer"}),
    "ByLoss, sharded gradients": ("ByLoss", {"shard": "gradients"}),
    "ByLoss, sum, sharded gradients": ("ByLoss", {"shard": "gradients", "op": hvd.Sum}),
    "ByLoss, late": ("ByLoss", {"strategy": LateAverage()}),
    "line search, late": ("line search", {"strategy": LateAverage()}),
    "ByBackward": ("ByBackward", {}),
}


@pytest.mark.parametrize(
    "case", [name if name == "line search" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@pytest.mark.native("Horovod's core has no sharded optimizers and no strategies")
def test_ranks_decide_as_one_process_with_the_whole_batch(case: str) -> None:
    kind, options = CASES[case]
    sums, passes = "sum" in case, 2 if "passes" in case else 1
    wanted = _train(kind, slice(None), sums=sums, passes=passes)
    found = run_ranks(RANKS, _on_ranks, kind, options, "some" in case, sums, passes)
    results = [one for one in found if one is not None]
    assert len(results) == (2 if "some" in case else RANKS)
    for values, calls, losses in results:
        assert calls == wanted[1]
        np.testing.assert_allclose(losses, wanted[2], rtol=1e-5)  # a line search amplifies the rounding of sums
        for one, two, same in zip(values, wanted[0], results[0][0], strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(one, same)


def _kinds() -> list[Any]:
    found: list[Any] = []
    with joined():
        rank, model = hvd.rank(), nn.Linear(2, 1)
        kinds: list[Any] = [
            float(rank),
            torch.tensor(rank, dtype=torch.bfloat16),
            torch.tensor([float(rank)], dtype=torch.float64),
            None,
            None if rank == 1 else float(rank),
            torch.tensor(float("nan") if rank == 2 else 0.0),
            np.float32(rank),
            ("a pair", rank),
        ]
        optimizer = hvd.DistributedOptimizer(ByLoss(model.parameters(), 0.0), model.named_parameters())
        optimizer._hvdkit_step = lambda closure: closure()
        for kind in kinds:

            def closure(kind: Any = kind) -> Any:
                model(torch.ones(1, 2)).sum().backward()
                return kind

            loss = optimizer.step(closure)
            found.append((str(loss.dtype), loss.tolist()) if isinstance(loss, torch.Tensor) else loss)
    return found


def test_what_closures_may_return() -> None:
    found = run_ranks(RANKS, _kinds)
    for rank, one in enumerate(found):
        assert one[:5] == [1.0, ("torch.bfloat16", 1.0), ("torch.float64", [1.0]), None, 2 / 3]
        assert one[5][0] == "torch.float32" and np.isnan(one[5][1])
        assert one[6:] == [1.0, ("a pair", rank)]


def _own_losses(strategy: str) -> list[float]:
    with joined():
        model = _model()
        named = list(model.named_parameters())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = {
            "local": lambda: hvd.LocalSGD(inner, named, every=2),
            "after a warm-up": lambda: hvd.LocalSGD(inner, named, every=2, start_after=2),
            "asynchronous": lambda: hvd.AsynchronousOptimizer(inner, named),
            "adasum": lambda: hvd.DistributedOptimizer(inner, named, op=hvd.Adasum),
            "backup": lambda: hvd.BackupSteps(inner, named, drop=1),
        }[strategy]()

        def closure() -> float:
            optimizer.zero_grad()
            model(_batch(slice(hvd.rank(), None, hvd.size()))[0]).square().mean().backward()
            return float(hvd.rank())

        losses = [float(optimizer.step(closure)) for _ in range(4)]
        if strategy in ("asynchronous", "backup"):
            optimizer.finish()
        return losses


@pytest.mark.slow
@pytest.mark.native("Horovod's core has none of these strategies")
@pytest.mark.parametrize("strategy", ["local", "after a warm-up", "asynchronous", "adasum", "backup"])
def test_ranks_that_step_by_themselves_decide_by_themselves(strategy: str) -> None:
    for rank, losses in enumerate(run_ranks(RANKS, _own_losses, strategy)):
        average = [1.0] * 2 if strategy == "after a warm-up" else [float(rank)] * 2
        assert losses == [*average, float(rank), float(rank)]


def _refused() -> str:
    with joined():
        model = nn.Linear(2, 1)
        with pytest.raises(ValueError, match="decides by the loss") as error:
            hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), strategy=BackupSteps(1))
        return str(error.value)


@pytest.mark.slow
@pytest.mark.native("Horovod's core has no backup steps")
def test_backup_steps_cannot_decide_by_a_loss() -> None:
    assert "BackupSteps does not average it" in run_ranks(RANKS, _refused)[0]


def _unequal_parts() -> Any:
    with joined():
        torch.manual_seed(0)
        x, y = _batch()
        dataset = torch.utils.data.TensorDataset(x, y)
        model = _model()
        optimizer = hvd.DistributedOptimizer(ByLoss(model.parameters()), model.named_parameters())
        sampler = hvd.data.BalancedSampler(dataset, 20, optimizer, shuffle=False, speeds=[1.0, 2.0, 4.0], every=1000)
        for inputs, targets in torch.utils.data.DataLoader(dataset, batch_sampler=sampler):

            def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)
        return weights(model)


@pytest.mark.slow
@pytest.mark.native("Horovod's core weights no gradients")
def test_a_loss_weighs_as_its_gradients() -> None:
    model = _model()
    optimizer = ByLoss(model.parameters())
    x, y = _batch()
    for inputs, targets in zip(x.split(20), y.split(20), strict=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step(lambda loss=loss: loss)  # type: ignore[misc]
    for found in run_ranks(RANKS, _unequal_parts):
        for one, two in zip(found, weights(model), strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-12)
