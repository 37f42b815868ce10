"""DistributedOptimizer(op=Adasum): the ranks' own steps, combined, as the formula says of steps in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.errors import ReplicasDifferError

pytestmark = pytest.mark.ranks

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.05),
}


def _on(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(size, _joined, body, args, timeout=60)


def _joined(body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with joined():
        return body(*args)


def _make() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(100 * step + rank).normal(size=(5, 4)))


def _own_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    (model(_batch(rank, step)) - 1).square().mean().backward()
    optimizer.step()


def _adasum(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    dot, first, second = (one * two).sum(), one.square().sum(), two.square().sum()
    return (1 - dot / (2 * first) if first else 1) * one + (1 - dot / (2 * second) if second else 1) * two


def _train(kind: str) -> None:
    """Two ranks train, and each also simulates both in one process."""
    model = _make()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), op=hvd.Adasum)
    assert isinstance(optimizer, type(OPTIMIZERS[kind]([torch.nn.Parameter(torch.ones(1))])))
    models = [_make() for _ in range(2)]
    optimizers = [OPTIMIZERS[kind](one.parameters()) for one in models]
    for step in range(6):
        _own_step(model, optimizer, hvd.rank(), step)
        start = [one.detach().clone() for one in models[0].parameters()]
        for rank in range(2):
            _own_step(models[rank], optimizers[rank], rank, step)
        with torch.no_grad():
            for at, (one, two) in enumerate(zip(models[0].parameters(), models[1].parameters(), strict=True)):
                change = _adasum(one - start[at], two - start[at])
                one.copy_(start[at] + change)
                two.copy_(one)
        for mine, expected in zip(model.parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["SGD", pytest.param("Adam", marks=pytest.mark.slow_on("native"))])
def test_steps_are_combined_by_the_formula(kind: str) -> None:
    _on(2, _train, kind)


def _stay_equal(compression: str) -> list[float]:
    model = _make().float()
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        backward_passes_per_step=2,
        op=hvd.Adasum,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        for part in range(2):
            loss = (model(_batch(hvd.rank(), part).float()) - 1).square().mean()
            loss.backward()
        optimizer.synchronize()
        optimizer.step()
        if step % 4 == 3:
            schedule.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return [value for one in model.parameters() for value in one.detach().flatten().tolist()]


@pytest.mark.parametrize(
    ("size", "compression"),
    [
        pytest.param(1, "none", marks=pytest.mark.slow),
        pytest.param(2, "fp16", marks=pytest.mark.slow),
        pytest.param(3, "none", marks=[pytest.mark.native("Horovod's Adasum is for powers of two"), pytest.mark.slow]),
        pytest.param(4, "bf16", marks=[pytest.mark.native("Horovod adds no bfloat16"), pytest.mark.slow]),
    ],
)
def test_ranks_stay_equal_and_learn(size: int, compression: str) -> None:
    results = _on(size, _stay_equal, compression)
    assert all(one == results[0] for one in results)


def _refused() -> None:
    model = _make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum)
    with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
        pass
    with pytest.raises(ValueError, match="only once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum, gradient_predivide_factor=2)


def test_what_does_not_go_with_adasum_is_refused() -> None:
    _on(2, _refused)


def _on_a_set() -> list[float]:
    pair = hvd.add_process_set([0, 2])
    model = _make()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), op=hvd.Adasum, process_set=pair
    )
    for step in range(3):
        _own_step(model, optimizer, hvd.rank(), step)
    return [value for one in model.parameters() for value in one.detach().flatten().tolist()]


@pytest.mark.native("Horovod's Adasum is for all ranks")
def test_ranks_outside_of_the_set_step_alone() -> None:
    first, second, third = _on(3, _on_a_set)
    assert first == third != second


def _with_more_parameters(simulated: bool) -> list[float]:
    """A frozen layer is unfrozen, a group of parameters is added, and the world is made anew between the steps."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).double()]
    models.append(copy.deepcopy(models[0]))
    optimizers = []
    for model in models:
        model[1].requires_grad_(False)
        optimizers.append(torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], 0.1))
    mine = range(2) if simulated else [hvd.rank()]
    if not simulated:
        hvd.DistributedOptimizer(optimizers[hvd.rank()], op=hvd.Adasum)
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 2:
                model[1].requires_grad_(True)
            if step == 4:
                optimizer.add_param_group({"params": list(model[2].parameters())})
        if step == 3 and not simulated:
            hvd.shutdown()
            hvd.init(check_replicas=2)
        start = [parameter.detach().clone() for parameter in models[0].parameters()]
        for rank in mine:
            _own_step(models[rank], optimizers[rank], rank, step)
        if simulated:
            with torch.no_grad():
                for first, second, before in zip(*(model.parameters() for model in models), start, strict=True):
                    first.copy_(before + _adasum(first - before, second - before))
                    second.copy_(first)
    return [value for one in models[mine[0]].parameters() for value in one.detach().flatten().tolist()]


def test_parameters_may_be_added_and_unfrozen_and_the_world_made_anew() -> None:
    results, expected = _on(2, _with_more_parameters, False), _with_more_parameters(True)
    assert results[0] == results[1]
    np.testing.assert_allclose(results[0], expected, rtol=1e-10, atol=1e-12)


def _differ() -> None:
    hvd.shutdown()
    hvd.init(check_replicas=2)
    model = _make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum)
    _own_step(model, optimizer, hvd.rank(), 0)
    with torch.no_grad():
        next(model.parameters()).add_(hvd.rank())
    with pytest.raises(ReplicasDifferError, match=r"group\.0\.0"):
        _own_step(model, optimizer, hvd.rank(), 1)


def test_replicas_are_compared() -> None:
    _on(2, _differ)
