"""DistributedOptimizer(strategy=...): strategies of a user train as they should, and are called as it is written."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from averaging import LateAverage, NamedAverage, PeriodicAverage
from cases import product
from ranks import run_ranks
from torch_world import Case, Weights, assert_alike, joined, train, train_here, weights

import hvdkit.torch as hvd
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.array_sync import ArraySync
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.strategy import Parameters, Strategy
from hvdkit.errors import BackwardInterruptedError

pytestmark = pytest.mark.ranks


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "named average": NamedAverage,
    "in step()": LateAverage,
    "AllReduce": AllReduce,
}
CASES = {
    "SGD": Case("SGD"),
    "AdamW, large": Case("AdamW", {"lr": 0.01}, hidden=9_001, steps=3),
    "two passes": Case("SGD", steps=5, passes=2),
    "two passes, set_to_none=False": Case("SGD", steps=5, passes=2, set_to_none=False),
}
LARGER = [name for name in CASES if name != "SGD"]


def _train(case: Case, strategy: str) -> Weights:
    with joined():
        model, optimizer = case.make()
        hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            backward_passes_per_step=case.passes,
            strategy=STRATEGIES[strategy](),
        )
        return train(case, model, optimizer, rank=hvd.rank(), of=hvd.size(), size=hvd.size())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_of_ones_own_trains_as_one_process(strategy: str, size: int) -> None:
    assert_alike(run_ranks(size, _train, CASES["SGD"], strategy), train_here(CASES["SGD"], size), 1e-10)


# Each case, and each strategy.
@pytest.mark.parametrize(
    ("case", "strategy"),
    product(
        LARGER,
        STRATEGIES,
        quick=lambda case, strategy: LARGER.index(case) == list(STRATEGIES).index(strategy),
    ),
)
def test_large_gradients_and_windows(case: str, strategy: str) -> None:
    assert_alike(run_ranks(2, _train, CASES[case], strategy), train_here(CASES[case], 2), 1e-10)


LOCAL = Case("SGD", {"lr": 0.05}, steps=1)
EVERY, STEPS = 3, 8


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    inputs, targets = LOCAL.batch(step, 0, 2)
    mine = slice(rank * LOCAL.rows, (rank + 1) * LOCAL.rows)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
    optimizer.step()


def _make(strategy: Strategy) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = LOCAL.make()
    # Elements that do not follow each other row by row, and some that lie in a larger tensor.
    first = model.get_parameter("0.weight")
    first.data = first.data.t().contiguous().t()
    last = model.get_parameter("2.bias")
    last.data = torch.stack([last.data, last.data], dim=1)[:, 0]
    hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy=strategy)
    return model, optimizer


def _train_locally(restart_after: int) -> Weights:
    """One rank of local SGD; after some steps all goes on in a new optimizer with the saved state."""
    with joined(check_replicas=2):
        strategy = PeriodicAverage(EVERY)
        model, optimizer = _make(strategy)
        for step in range(STEPS):
            if step == restart_after:
                saved = model.state_dict(), strategy.state_dict()
                strategy = PeriodicAverage(EVERY)
                model, optimizer = _make(strategy)
                model.load_state_dict(saved[0])
                strategy.load_state_dict(saved[1])
            _step(model, optimizer, step, hvd.rank())
        return weights(model)


def _simulate() -> list[Weights]:
    pairs = [LOCAL.make() for _ in range(2)]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(pairs):
            _step(model, optimizer, step, rank)
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for first, second in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
                    mean = (first + second) / 2
                    first.copy_(mean)
                    second.copy_(mean)
    return [weights(model) for model, _ in pairs]


@pytest.mark.parametrize("restart_after", [-1, 4])
def test_parameters_averaged_now_and_then_also_after_a_restart(restart_after: int) -> None:
    results, expected = run_ranks(2, _train_locally, restart_after), _simulate()
    for rank in range(2):
        for one, two in zip(results[rank], expected[rank], strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-12)
    assert any((one != two).any() for one, two in zip(*results, strict=True))  # two steps after the last average


class Recorder(NamedAverage):
    """Writes down how it is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach."""
        self.calls.append("attach " + " ".join(tensor.name for tensor in parameters.tensors))
        super().attach(parameters, group)

    def arrived(self, index: int) -> None:
        """See Strategy.arrived."""
        self.calls.append(f"arrived {index}")

    def before_step(self) -> None:
        """See Strategy.before_step."""
        self.calls.append("before")
        super().before_step()

    def after_step(self) -> None:
        """See Strategy.after_step."""
        self.calls.append("after")

    def cancel(self) -> None:
        """See Strategy.cancel."""
        self.calls.append("cancel")

    def detach(self) -> None:
        """See Strategy.detach."""
        self.calls.append("detach")


class _Within(Strategy):
    """Has another strategy do all."""

    uses_values = False

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.uses_values = inner.uses_values

    def after_step(self) -> None:
        """See Strategy.after_step."""
        self.inner.after_step()


def test_a_strategy_says_whether_it_uses_the_parameters_values() -> None:
    assert not AllReduce().uses_values and not LateAverage().uses_values
    assert PeriodicAverage(2).uses_values and type("After", (AllReduce,), {"after_step": print})().uses_values
    assert not _Within(AllReduce()).uses_values and _Within(PeriodicAverage(2)).uses_values


def _record() -> list[list[str]]:
    strategy, seen = Recorder(), []

    def take() -> None:
        seen.append(strategy.calls[:])
        strategy.calls.clear()

    model = torch.nn.Linear(2, 1)
    with joined():
        model.bias.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), strategy=strategy
        )
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            strategy.calls.append("backward has ended")
            optimizer.step()
            take()
        model.bias.requires_grad_(True)
        model(torch.ones(1, 2)).sum().backward()
        take()
        optimizer.step()
        take()
        optimizer.zero_grad()
        inputs = 1 * torch.ones(1, 2, requires_grad=True)
        inputs.register_hook(_fail)  # when the parameters' gradients are there
        with pytest.raises(ArithmeticError):
            model(inputs).sum().backward()
        optimizer.zero_grad()
        take()
    take()
    with joined():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        take()
    return seen


class FailsOnce(NamedAverage):
    """before_step() raises ArithmeticError in one step, on all ranks."""

    def __init__(self, step: int) -> None:
        self._left = step

    def before_step(self) -> None:
        """See Strategy.before_step."""
        self._left -= 1
        if self._left == 0:
            raise ArithmeticError
        super().before_step()


def _reduction_of_the_first_fails(step: int, zero: bool) -> list[float]:
    """After each step the second optimizer's gradient, whose first reduction fails in one of them."""
    with joined():
        first, second = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
        failing = hvd.DistributedOptimizer(torch.optim.SGD([first], 1.0), strategy=FailsOnce(step))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([second], 1.0))
        gradients: list[float] = []
        for number in (1, 2, 3):
            loss = ((first + second) * (number + hvd.rank())).sum()
            if number != step:
                loss.backward()
            else:
                with pytest.raises(ArithmeticError):
                    loss.backward()
                if zero:
                    with pytest.raises(BackwardInterruptedError):
                        optimizer.zero_grad()
                    return gradients
                optimizer.step()
            assert second.grad is not None
            gradients.append(second.grad.mean().item())
            optimizer.zero_grad()
            failing.zero_grad()
        return gradients


@pytest.mark.native("Horovod's core sends each gradient as it arrives")
@pytest.mark.parametrize("step", [1, 2])
def test_an_optimizer_goes_on_where_the_reduction_of_one_before_has_failed(step: int) -> None:
    assert run_ranks(2, _reduction_of_the_first_fails, step, False) == [[1.5, 2.5, 3.5]] * 2


@pytest.mark.native("Horovod's core sends each gradient as it arrives")
def test_gradients_that_were_sent_and_not_reduced_are_not_thrown_away() -> None:
    assert run_ranks(2, _reduction_of_the_first_fails, 2, True, fresh=True) == [[1.5]] * 2


def _drop() -> list[bool]:
    """Are strategies freed with the optimizer and the list of arrays that they belong to?"""
    with joined():
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0))
        parameter.sum().backward()
        optimizer.step()
        strategies = [weakref.ref(optimizer._hvdkit.strategy)]
        group = hvd.global_process_set.group("a test")
        arrays = ArraySync(group, [TensorSpec("a", 3, "float32")], AllReduce(), compute_threads=0)
        strategies.append(weakref.ref(arrays._strategy))
        del parameter, optimizer, arrays
        gc.collect()
        return [strategy() is None for strategy in strategies]


def test_an_optimizer_that_nobody_holds_is_freed() -> None:
    assert run_ranks(2, _drop) == [[True, True]] * 2


def _fail(gradient: torch.Tensor) -> None:
    raise ArithmeticError("as a user's hook does")


def test_calls_come_in_the_order_of_the_interface() -> None:
    results = run_ranks(2, _record)
    assert results[0] == results[1]
    first, second, unfrozen, step, interrupted, shutdown, anew = results[0]
    assert first == ["attach weight", "before", "backward has ended", "after"]
    assert second == ["arrived 0", "before", "backward has ended", "after"]
    assert unfrozen == ["arrived 0", "before", "attach weight bias", "before"]
    assert step == ["after"]
    assert sorted(interrupted) == ["arrived 0", "arrived 1", "cancel"] and interrupted[-1] == "cancel"
    assert shutdown == ["detach"]
    assert anew == ["attach weight bias", "before", "after"]


def _refused() -> None:
    def wrap(**arguments: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1), **arguments)

    with joined():
        with pytest.raises(ValueError, match="cannot be combined with op"):
            wrap(strategy=NamedAverage(), op=hvd.Adasum)
        with pytest.raises(ValueError, match="cannot be combined with gradient_predivide_factor, compression,"):
            wrap(strategy=NamedAverage(), gradient_predivide_factor=2.0, compression=hvd.Compression.fp16)
        with pytest.raises(TypeError, match="subclass of Strategy"):
            wrap(strategy=NamedAverage)
        strategy = NamedAverage()
        optimizer = wrap(strategy=strategy)
        with pytest.raises(ValueError, match="strategy of another optimizer"):
            wrap(strategy=strategy)
        with optimizer.skip_synchronize():
            pass
        assert str(type(optimizer)) == "<class 'hvdkit.torch.optimizer.SGD'>"
        optimizer.synchronize()
        horovods = "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize()."
        with pytest.warns(UserWarning, match="^" + re.escape(horovods)):  # by these words scripts filter it
            optimizer.step()
        with pytest.raises(NotImplementedError, match=r"engine\.api"):
            type("Own", (hvd._DistributedOptimizer,), {"synchronize": print})  # as research code does with Horovod's
        with pytest.raises(NotImplementedError, match="strategy="):
            hvd.optimizer._DistributedOptimizer([])
        late = wrap(strategy=LateAverage())
        with pytest.raises(AssertionError, match="LateAverage"), late.skip_synchronize():
            pass
        with pytest.raises(ValueError, match="has no state"):
            strategy.load_state_dict({"steps": 3})
        strategy.load_state_dict(strategy.state_dict())


def test_what_contradicts_a_strategy_is_refused() -> None:
    run_ranks(1, _refused)
