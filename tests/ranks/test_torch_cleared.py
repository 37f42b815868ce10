"""Gradients cleared in any way end their window; parameters that an optimizer was not given are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch_world import joined

import hvdkit.torch as hvd

pytestmark = pytest.mark.native("Horovod's core has no sharded state and no such strategies")


def _zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def _none(model: nn.Module) -> None:
    model.zero_grad()


def _by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


_CLEARINGS = {"zero": _zero, "none": _none, "by hand": _by_hand}


def _make() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(2, 2)).double()


def _backward(model: Any, step: int, ranks: range, *, total: bool) -> None:
    inputs = torch.randn(9, 6, generator=torch.Generator().manual_seed(step)).double()
    loss = model[2](model[1](model[0](torch.cat([inputs[3 * rank : 3 * rank + 3] for rank in ranks]))))
    (loss.square().sum() if total else loss.square().sum() / len(ranks)).backward()


def _wrap(model: nn.Module, form: str, **arguments: Any) -> Any:
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return getattr(hvd, form)(plain, model.named_parameters(), **arguments)


def _after_skipped_steps(form: str, arguments: dict[str, Any], clearing: str) -> float:
    """Every second step is skipped, as GradScaler does, and the model's gradients are cleared instead."""
    with joined():
        model, alone = _make(), _make()
        optimizer, plain = _wrap(model, form, **arguments), torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
        total = arguments.get("op") is hvd.Sum
        passes = arguments.get("backward_passes_per_step", 1)
        for step in range(6):
            _CLEARINGS[clearing](model)
            plain.zero_grad()
            for window in range(passes):
                _backward(model, 10 * step + window, range(hvd.rank(), hvd.rank() + 1), total=total)
                _backward(alone, 10 * step + window, range(3), total=total)
            if step % 2:
                optimizer.step()
                plain.step()
        if form != "DistributedOptimizer":
            optimizer.finish()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        return max(float((one - two).detach().abs().max()) for one, two in pairs)


@pytest.mark.ranks
@pytest.mark.parametrize("clearing", list(_CLEARINGS))
@pytest.mark.parametrize(
    ("form", "arguments"),
    [
        ("DistributedOptimizer", {}),
        ("DistributedOptimizer", {"op": hvd.Sum}),
        ("DistributedOptimizer", {"op": hvd.Sum, "backward_passes_per_step": 2}),
        ("DistributedOptimizer", {"shard": "optimizer"}),
        ("DistributedOptimizer", {"shard": "gradients"}),
        ("BackupSteps", {"drop": 0}),
    ],
    ids=str,
)
def test_a_skipped_step_may_be_followed_by_the_clearing_of_the_model(
    form: str, arguments: dict[str, Any], clearing: str
) -> None:
    if arguments.get("shard") == "gradients" and clearing == "zero":
        clearing = "none"  # zeros in parts are refused, see test_what_is_not_cleared_is_refused_or_counted_on
    assert max(run_ranks(3, _after_skipped_steps, form, arguments, clearing)) < 1e-12


def _dropped_window(clearing: str) -> None:
    """A window of three passes is dropped after two: the next one has three again."""
    with joined():
        model, alone = _make(), _make()
        optimizer = _wrap(model, "DistributedOptimizer", backward_passes_per_step=3)
        drop = _CLEARINGS[clearing]
        for step in range(3):
            for window in range(2):
                _backward(model, window, range(hvd.rank(), hvd.rank() + 1), total=False)
            drop(model)
            alone.zero_grad()
            for window in range(3):
                before = optimizer.reduction_statistics().generations
                assert before == step
                _backward(model, 5 + window, range(hvd.rank(), hvd.rank() + 1), total=False)
                _backward(alone, 5 + window, range(3), total=False)
            assert optimizer.reduction_statistics().generations == step + 1
            for one, two in zip(model[:3].parameters(), alone[:3].parameters(), strict=True):
                torch.testing.assert_close(one.grad, two.grad)
            optimizer.zero_grad()


@pytest.mark.ranks
@pytest.mark.parametrize("clearing", ["none", "by hand"])
def test_a_window_that_was_dropped_is_not_counted_on(clearing: str) -> None:
    run_ranks(3, _dropped_window, clearing)


def _zeros_of_one_rank() -> None:
    """The first pass gives rank 0 zeros, and all ranks change their gradients in place after it: the window goes on."""
    with joined():
        model = _make()
        optimizer = _wrap(model, "DistributedOptimizer", backward_passes_per_step=2)
        for window in range(2):
            loss = model[2](model[0](torch.ones(1, 6).double())).square().sum()
            (loss * (0.0 if hvd.rank() == 0 and window == 0 else 1.0)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert optimizer.reduction_statistics().generations == 1
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        everyone = hvd.allgather(gradients[None])
        assert torch.equal(everyone, gradients.expand_as(everyone))


@pytest.mark.ranks
def test_a_rank_with_zeros_alone_does_not_drop_a_window() -> None:
    run_ranks(3, _zeros_of_one_rank)


def _not_cleared() -> None:
    """What changes gradients and does not clear them: the error names the cure, a window goes on."""
    with joined():
        mine = range(hvd.rank(), hvd.rank() + 1)

        def halve(model: nn.Module) -> None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 0.5

        def replace(model: nn.Module) -> None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 0.5

        def clear_one(model: Any) -> None:
            model[0].weight.grad = None

        changes: list[Callable[[nn.Module], None]] = [halve, replace, clear_one]
        for change in changes:
            model = _make()
            optimizer = _wrap(model, "DistributedOptimizer", op=hvd.Sum)
            _backward(model, 0, mine, total=False)
            change(model)
            with pytest.raises(hvd.HorovodInternalError, match=r"call optimizer\.zero_grad"):
                _backward(model, 1, mine, total=False)
            optimizer.zero_grad()
            optimizer = _wrap(model, "DistributedOptimizer", backward_passes_per_step=2)
            _backward(model, 0, mine, total=False)
            change(model)
            _backward(model, 1, mine, total=False)
            assert optimizer.reduction_statistics().generations == 1
            optimizer.zero_grad()
        model = _make()
        optimizer = _wrap(model, "DistributedOptimizer", shard="gradients")
        _backward(model, 0, mine, total=False)
        model.zero_grad(set_to_none=False)
        with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad"):
            _backward(model, 1, mine, total=False)


@pytest.mark.ranks
def test_what_is_not_cleared_is_refused_or_counted_on() -> None:
    run_ranks(3, _not_cleared)


def _replaced(form: str, arguments: dict[str, Any]) -> None:
    with joined(check_replicas=1):
        model = _make()
        optimizer = _wrap(model, form, **arguments)
        optimizer.zero_grad()
        _backward(model, 0, range(hvd.rank(), hvd.rank() + 1), total=False)
        optimizer.step()
        optimizer.zero_grad()
        model[2] = nn.Linear(4, 3).double()
        known = optimizer.param_groups[0]["params"]
        changes: list[Any] = [list(model.parameters()), [*known[:2], model[2].weight], [*known, model[2].weight]]
        for change in changes:
            optimizer.param_groups[0]["params"] = change
            _backward(model, 1, range(hvd.rank(), hvd.rank() + 1), total=False)
            index = next(at for at, each in enumerate(change) if each is model[2].weight)
            found = rf"param_groups\[0\]..params..\[{index}\], of shape \(3, 4\), was put there"
            with pytest.raises(ValueError, match=found):
                optimizer.step()
            optimizer.param_groups[0]["params"] = known
            optimizer.zero_grad()
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        optimizer.param_groups[0]["params"] = [*known, frozen]
        optimizer.step()
        hvd.barrier()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("form", "arguments"),
    [
        ("DistributedOptimizer", {}),
        ("DistributedOptimizer", {"shard": "optimizer"}),
        ("DistributedOptimizer", {"op": hvd.Adasum}),
        ("LocalSGD", {"every": 2}),
        ("AsynchronousOptimizer", {"staleness": 2}),
    ],
    ids=str,
)
def test_parameters_that_were_put_into_param_groups_are_refused(form: str, arguments: dict[str, Any]) -> None:
    run_ranks(3, _replaced, form, arguments)


def _squares(model: nn.Module, step: int, ranks: range, *, total: bool) -> None:
    """A backward pass of a model of one parameter, each rank with a row of its own."""
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(step)).double()
    (model(inputs[ranks.start : ranks.stop]).square().sum() / (1 if total else len(ranks))).backward()


def _one_parameter(form: str, arguments: dict[str, Any], clearing: str) -> float:
    """Every second window is dropped, of which one is cut short if it has several passes."""
    with joined():
        torch.manual_seed(0)
        model, alone = (nn.Linear(6, 4, bias=False).double() for _ in range(2))
        alone.load_state_dict(model.state_dict())
        optimizer, plain = _wrap(model, form, **arguments), torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
        passes = arguments.get("backward_passes_per_step", 1)
        for step in range(7):
            _CLEARINGS[clearing](model)
            plain.zero_grad()
            for window in range(passes - (step == 2 and clearing != "zero")):
                _squares(model, 10 * step + window, range(hvd.rank(), hvd.rank() + 1), total="op" in arguments)
                _squares(alone, 10 * step + window, range(3), total="op" in arguments)
            if step % 2:
                optimizer.step()
                plain.step()
            elif step == 4 and clearing != "zero":  # the averages are there before step()
                assert alone.weight.grad is not None and model.weight.grad is not None
                if arguments.get("shard") is None and form == "DistributedOptimizer":
                    torch.testing.assert_close(model.weight.grad, alone.weight.grad)
        if form != "DistributedOptimizer":
            optimizer.finish()
        return float((model.weight - alone.weight).detach().abs().max())


@pytest.mark.ranks
@pytest.mark.parametrize("clearing", list(_CLEARINGS))
@pytest.mark.parametrize(
    ("form", "arguments"),
    [
        ("DistributedOptimizer", {"op": hvd.Sum}),
        ("DistributedOptimizer", {"backward_passes_per_step": 3}),
        ("DistributedOptimizer", {"op": hvd.Sum, "backward_passes_per_step": 2}),
        ("DistributedOptimizer", {"shard": "optimizer"}),
        ("DistributedOptimizer", {"shard": "gradients"}),
        ("BackupSteps", {"drop": 0}),
    ],
    ids=str,
)
def test_the_only_parameter_may_be_cleared(form: str, arguments: dict[str, Any], clearing: str) -> None:
    if arguments.get("shard") == "gradients" and clearing == "zero":
        clearing = "none"
    assert max(run_ranks(3, _one_parameter, form, arguments, clearing)) < 1e-12


def _unequal_windows() -> None:
    """Before the gradients are cleared rank 0 has used one parameter, the others two: all begin a new window."""
    with joined():
        model: Any = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)).double()
        optimizer = _wrap(model, "DistributedOptimizer", backward_passes_per_step=3)
        inputs = torch.ones(1, 6).double()
        for step in range(2):
            sum((one(inputs).sum() for one in model[: 1 + (hvd.rank() > 0)]), torch.zeros(())).backward()
            model.zero_grad()
            for window in range(3):
                assert optimizer.reduction_statistics().generations == step
                _squares(model[0], window, range(hvd.rank(), hvd.rank() + 1), total=False)
            assert optimizer.reduction_statistics().generations == step + 1
            optimizer.zero_grad()


def _only_one_of_two() -> None:
    """A gradient that was not cleared is added to, whichever arrives first: refused, or the window goes on."""
    with joined():
        mine = range(hvd.rank(), hvd.rank() + 1)
        for cleared in range(2):
            for passes, op in ((1, hvd.Sum), (2, hvd.Average)):
                model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
                optimizer = _wrap(model, "DistributedOptimizer", op=op, backward_passes_per_step=passes)
                _squares(model, 0, mine, total=False)
                list(model.parameters())[cleared].grad = None
                if passes == 1:
                    with pytest.raises(hvd.HorovodInternalError, match=r"call optimizer\.zero_grad"):
                        _squares(model, 1, mine, total=False)
                else:
                    _squares(model, 1, mine, total=False)
                    assert optimizer.reduction_statistics().generations == 1
                optimizer.zero_grad()


def _only_one_not_cleared() -> None:
    """The only gradient was changed and not cleared: refused, or the window goes on."""
    with joined():
        mine = range(hvd.rank(), hvd.rank() + 1)
        for retain in (False, True):  # with create_graph=True autograd adds into a new tensor
            for passes, op in ((1, hvd.Sum), (2, hvd.Average)):
                model = nn.Linear(6, 4, bias=False).double()
                optimizer = _wrap(model, "DistributedOptimizer", op=op, backward_passes_per_step=passes)
                _squares(model, 0, mine, total=False)
                assert model.weight.grad is not None
                model.weight.grad = model.weight.grad * 0.5
                loss = model(torch.ones(1, 6).double()).square().sum()
                if passes == 1:
                    with pytest.raises(hvd.HorovodInternalError, match=r"call optimizer\.zero_grad"):
                        loss.backward(create_graph=retain)
                else:
                    torch.autograd.grad(loss, [model.weight], retain_graph=True)  # accumulates nothing
                    loss.backward(create_graph=retain)
                    assert optimizer.reduction_statistics().generations == 1
                optimizer.zero_grad()


@pytest.mark.ranks
@pytest.mark.parametrize("case", [_unequal_windows, _only_one_of_two, _only_one_not_cleared])
def test_a_gradient_counts_as_cleared_by_what_it_was_before_the_pass(case: Callable[[], None]) -> None:
    run_ranks(3, case)
