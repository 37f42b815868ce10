"""DistributedOptimizer(shard=...): the parameters of one process, with a part of the optimizer's state on each rank."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch_world import Case, Weights, assert_alike, joined, train_here, train_on_ranks, weights

import hvdkit.torch as hvd
from hvdkit.errors import HorovodInternalError

pytestmark = [pytest.mark.ranks, pytest.mark.native("Horovod's core has no all-gather of buckets")]

BOTH = pytest.mark.parametrize("shard", ["optimizer", pytest.param("gradients", marks=pytest.mark.slow)])
BOTH_LATE = pytest.mark.parametrize("shard", [pytest.param("optimizer", marks=pytest.mark.slow), "gradients"])
CASES = {
    "SGD": Case(options={"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adam": Case("Adam", {"lr": 0.01, "amsgrad": True}),
    "AdamW, float32": Case("AdamW", {"lr": 0.01}, dtype="float32"),
    "Adagrad": Case("Adagrad", {"lr": 0.05}),
    "RMSprop": Case("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "clipped": Case("AdamW", {"lr": 0.01, "weight_decay": 0.1}, clip=0.1),
    "two passes": Case("SGD", passes=2, clip=0.5),
    "large": Case("Adam", {"lr": 0.01}, hidden=90_001, steps=3),
    "GradScaler": Case("SGD", dtype="float32", autocast=True, infinite_at=3, clip=1.0),
}
QUICK = ("optimizer-SGD", "optimizer-AdamW, float32", "gradients-clipped", "gradients-GradScaler")


def _cases() -> list[Any]:
    pairs = [(shard, name) for shard in ("optimizer", "gradients") for name in CASES]
    return [
        pytest.param(*pair, id="-".join(pair), marks=[pytest.mark.slow] * ("-".join(pair) not in QUICK))
        for pair in pairs
    ]


@pytest.mark.parametrize(("shard", "name"), _cases())
def test_ranks_train_as_one_process(shard: str, name: str) -> None:
    case = CASES[name]
    size = 2 if case.autocast else 3
    results = run_ranks(size, train_on_ranks, case, "auto", {"check_replicas": 2}, shard=shard)
    tolerance = 2e-2 if case.autocast else 1e-6 if case.dtype == "float32" else 1e-10
    assert_alike(results, train_here(case, size), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("transport", ["mpi", "gloo", "hierarchical_pairs", "hierarchical_uneven"])
def test_on_all_transports(transport: str, shard: str) -> None:
    settings = {"fusion_bytes": 2000, "buckets_in_flight": 2}
    case = CASES["Adam"]
    assert_alike(run_ranks(3, train_on_ranks, case, transport, settings, shard=shard), train_here(case, 3), 1e-10)


def _batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def _last(layer: Any) -> Any:
    return layer.to(memory_format=torch.channels_last)


def _make(seed: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    """A model with channels last, a frozen layer and one of its parameters unused; options a group."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"first": nn.Linear(7, 33), "last": nn.Linear(33, 3), "frozen": nn.Linear(3, 3)})
    model["unused"] = nn.Linear(2, 2)
    model["image"] = _last(nn.Conv2d(3, 5, 2))
    model["frozen"].requires_grad_(False)
    groups: list[dict[str, Any]] = [
        {"params": [*model["first"].parameters(), *model["frozen"].parameters()], "lr": 0.02, "weight_decay": 0.1},
        {"params": [*model["last"].parameters(), *model["unused"].parameters(), *model["image"].parameters()]},
    ]
    return model, torch.optim.AdamW(groups, lr=0.005)


def _step(model: Any, optimizer: Any, step: int, ranks: range) -> None:
    optimizer.zero_grad()
    losses = []
    for rank in ranks:
        hidden = model["frozen"](model["last"](torch.tanh(model["first"](_batch(step, rank)))))
        image = model["image"](_batch(step, rank).view(1, 3, 2, 7)).square().mean()
        losses.append(hidden.square().mean() + image)
    (sum(losses) / len(ranks)).backward()
    optimizer.step()


def _alone(steps: range, size: int, state: Any = None) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = _make()
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it goes on in the same tensors
    for step in steps:
        _step(model, optimizer, step, range(size))
    return model, optimizer


def _equal(one: Any, two: Any) -> None:
    """The same nested state, to 1e-6."""
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
        assert one.stride() == two.stride()
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            _equal(one[key], two[key])
    elif isinstance(one, list):
        assert len(one) == len(two)
        for pair in zip(one, two, strict=True):
            _equal(*pair)
    else:
        assert one == two


def _state(shard: str, steps: range, state: Any = None) -> dict[str, Any]:
    """The whole state after some steps of a sharded optimizer, from a state of whatever kind."""
    with joined(check_replicas=1):
        model, optimizer = _make(1 + hvd.rank())
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=shard)
        if state is not None and hvd.rank() == 0:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        hvd.broadcast_parameters(model.state_dict())
        hvd.broadcast_optimizer_state(optimizer)
        for step in steps:
            _step(model, optimizer, step, range(hvd.rank(), hvd.rank() + 1))
        return {"model": copy.deepcopy(model.state_dict()), "optimizer": optimizer.state_dict()}


@BOTH
def test_the_state_is_that_of_the_plain_optimizer_and_goes_on_on_any_number_of_ranks(shard: str) -> None:
    model, optimizer = _alone(range(3), 3)
    halfway = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found = run_ranks(3, _state, shard, range(3))
    for one in found:
        _equal(one, halfway)
    model, optimizer = _alone(range(3, 6), 2, found[0])  # a plain one loads it
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for one in run_ranks(2, _state, shard, range(3, 6), found[0]):  # so does another number of ranks
        _equal(one, whole)


def _checkpointed(shard: str, directory: Path, steps: range, *, load: bool) -> dict[str, Any]:
    with joined():
        model, optimizer = _make(1 + hvd.rank() * load)
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=shard)
        things = {"model": model, "optimizer": optimizer}
        assert (hvd.checkpoint.load(directory, **things) is not None) == load
        for step in steps:
            _step(model, optimizer, step, range(hvd.rank(), hvd.rank() + 1))
        hvd.checkpoint.save(directory, **things)
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@BOTH_LATE
def test_a_checkpoint_is_loaded_by_another_number_of_ranks(tmp_path: Path, shard: str) -> None:
    run_ranks(3, _checkpointed, shard, tmp_path, range(2), load=False)
    resumed = run_ranks(2, _checkpointed, shard, tmp_path, range(2, 4), load=True)
    model, optimizer = _alone(range(2), 3)
    model, optimizer = _alone(range(2, 4), 2, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for one in resumed:
        _equal(one, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def _thawed(shard: str, wrapped: bool) -> Weights:
    """Parameters are unfrozen and added between steps. wrapped: they were frozen after the optimizer was wrapped."""

    def wrap(optimizer: Any, model: Any) -> None:
        model["frozen"].requires_grad_(wrapped)
        hvd.DistributedOptimizer(optimizer, list(model.named_parameters()), shard=shard)
        model["frozen"].requires_grad_(False)

    with joined():
        model, optimizer = _thaw(wrap, range(hvd.rank(), hvd.rank() + 1))
        state = optimizer.state_dict()
        assert len(state["state"]) == 10  # of first, the old last, frozen, image and the new last
        return weights(model)


def _thaw(wrap: Any, ranks: range) -> tuple[Any, Any]:
    model, optimizer = _make()
    late = nn.Linear(33, 3)
    with torch.no_grad():
        for parameter in late.parameters():
            parameter.fill_(0.1)
    wrap(optimizer, model)
    for step in range(6):
        if step == 2:
            model["frozen"].requires_grad_(True)
        if step == 4:
            optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.01})
            model["last"] = late
        _step(model, optimizer, step, ranks)
    return model, optimizer


@pytest.mark.parametrize("wrapped", [False, True])
@BOTH_LATE
def test_parameters_may_be_unfrozen_and_added(shard: str, wrapped: bool) -> None:
    torch.set_num_threads(1)
    model, _ = _thaw(lambda optimizer, model: None, range(3))
    assert_alike(run_ranks(3, _thawed, shard, wrapped), weights(model), 1e-6)


def _bytes_of_state(shard: str | None) -> int:
    with joined():
        model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))
        optimizer = torch.optim.Adam(model.parameters())
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=shard)
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


@BOTH
def test_a_rank_keeps_its_part_of_the_state(shard: str) -> None:
    (whole,) = set(run_ranks(3, _bytes_of_state, None))
    for held in run_ranks(3, _bytes_of_state, shard):
        assert held == pytest.approx(whole / 3, rel=0.05)


def _with_masters(shard: str) -> tuple[Weights, list[str], Weights]:
    with joined():
        model, optimizer = _narrow()
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=shard, master_weights=True)
        for step in range(4):
            _narrow_step(model, optimizer, step, range(hvd.rank(), hvd.rank() + 1))
        state = optimizer.state_dict()["state"]
        masters = [state[at]["master_weight"] for at in range(2)]
        copied, other = _narrow()
        hvd.DistributedOptimizer(other, copied.named_parameters(), shard=shard, master_weights=True)
        copied.load_state_dict(model.state_dict())
        other.load_state_dict(optimizer.state_dict())
        for each in ((model, optimizer), (copied, other)):
            _narrow_step(*each, 4, range(hvd.rank(), hvd.rank() + 1))
        for one, two in zip(model.parameters(), copied.parameters(), strict=True):
            assert torch.equal(one, two)
        return weights(model), [str(one.dtype) for one in masters], [one.double().numpy() for one in masters]


def _narrow() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(7, 40).bfloat16()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _narrow_step(model: Any, optimizer: Any, step: int, ranks: range) -> None:
    optimizer.zero_grad()
    for rank in ranks:
        (model(_batch(step, rank, torch.bfloat16)).square().mean() / len(ranks)).backward()
    optimizer.step()


@BOTH_LATE
def test_master_weights_keep_what_bfloat16_would_lose(shard: str) -> None:
    model, _ = _narrow()
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-3, momentum=0.9)
    at_four: list[torch.Tensor] = []
    for step in range(5):
        gradients = []
        for rank in range(2):
            model.zero_grad()
            model(_batch(step, rank, torch.bfloat16)).square().mean().backward()
            gradients.append([parameter.grad.float() for parameter in model.parameters()])
        for master, *each in zip(masters, *gradients, strict=True):
            master.grad = (sum(each) / 2).bfloat16().float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        if step == 3:
            at_four = [master.detach().clone() for master in masters]
    for found, dtypes, kept in run_ranks(2, _with_masters, shard):
        assert dtypes == ["torch.float32"] * 2
        for one, master in zip(kept, at_four, strict=True):
            np.testing.assert_allclose(one, master.double().numpy(), rtol=0, atol=1e-6)
        for one, two in zip(found, weights(model), strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-2)


class Lars(torch.optim.Optimizer):
    """Divides each gradient by its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


class Lion(torch.optim.Optimizer):
    """The sign of a moving average."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter.sub_(average.lerp(parameter.grad, 0.1).sign(), alpha=group["lr"])
                average.lerp_(parameter.grad, 0.01)


def _refusals() -> dict[str, str]:
    with joined():
        found = {}

        def attempt(name: str, make: Any, **options: Any) -> None:
            model = nn.Linear(4, 4, bias=False)
            try:
                hvd.DistributedOptimizer(make(model.parameters()), **{"shard": "optimizer", **options})
            except (ValueError, TypeError) as error:
                found[name] = str(error)

        attempt("Lars", Lars)
        attempt("Lion", Lion)
        attempt("LBFGS", torch.optim.LBFGS)
        attempt("Adafactor", torch.optim.Adafactor)
        if hasattr(torch.optim, "Muon"):
            attempt("Muon", torch.optim.Muon)
        sgd = torch.optim.SGD
        attempt("word", sgd, shard="everything")
        attempt("Adasum", sgd, op=hvd.Adasum)
        attempt("strategy", sgd, strategy=object())
        attempt("masters", sgd, shard=None, master_weights=True)
        model = nn.Linear(4, 4)
        model.weight.data = model.weight.data.t()
        attempt("strides", lambda _: sgd(model.parameters()))
        optimizer = hvd.DistributedOptimizer(sgd(nn.Linear(2, 2).parameters(), lr=0.1), shard="optimizer")
        with pytest.raises(TypeError, match="state_dict"):
            copy.deepcopy(optimizer)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(optimizer)
        return found


def test_what_cannot_be_divided_is_refused_with_the_cure() -> None:
    for found in run_ranks(2, _refusals):
        assert "Lion" not in found, found["Lion"]
        for name in ("Lars", "LBFGS", "Adafactor", *(["Muon"] * hasattr(torch.optim, "Muon"))):
            assert name in found[name] and "treats every element by itself" in found[name]
        assert "'everything'" in found["word"]
        assert "op=hvd.Average" in found["Adasum"] and "strategy" in found["strategy"]
        assert "needs shard=" in found["masters"]
        assert "contiguous" in found["strides"]


def _committed(shard: str) -> None:
    """A commit has all parts: the state goes back to it, and to other ranks' after a shutdown()."""
    with joined():
        model, optimizer = _make()
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=shard)
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        state.sync()
        mine = range(hvd.rank(), hvd.rank() + 1)
        for step in range(2):
            _step(model, optimizer, step, mine)
        state.step = 2
        state.commit()
        for step in range(2, 4):
            _step(model, optimizer, step, mine)
        expected = copy.deepcopy(model.state_dict()), optimizer.state_dict()
        state.restore()
        state.sync()
        assert state.step == 2
        for step in range(2, 4):
            _step(model, optimizer, step, mine)
        _equal([dict(model.state_dict()), optimizer.state_dict()], [dict(expected[0]), expected[1]])
        state.restore()
    with joined():  # as after a change of the world
        state.sync()
        for step in range(2, 4):
            _step(model, optimizer, step, mine)
        _equal([dict(model.state_dict()), optimizer.state_dict()], [dict(expected[0]), expected[1]])


@BOTH
def test_a_commit_has_the_parts_of_all_ranks(shard: str) -> None:
    run_ranks(3, _committed, shard)


def _gradients_in_parts() -> list[float]:
    """What torch's functions say of gradients of which a rank has a part only, and what they refuse."""
    with joined():
        model, optimizer = _make()
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard="gradients")
        _loss(model, range(hvd.rank(), hvd.rank() + 1)).backward()
        first = model["first"].weight.grad
        assert "of 231 elements on this rank" in repr(first)
        with pytest.raises(RuntimeError, match=r"elements of the gradient of first\.weight"):
            first.sum()
        parameters = list(model.parameters())
        found = [float(nn.utils.clip_grad_norm_(parameters, 1e9, order)) for order in (2.0, 1.0, float("inf"))]
        nn.utils.clip_grad_value_(parameters, 0.002)
        found.append(float(nn.utils.clip_grad_norm_(parameters, 0.01)))
        found.append(float(nn.utils.clip_grad_norm_(parameters, 1e9)))
        model.zero_grad(set_to_none=False)
        with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\).*set_to_none=False\) keeps"):
            _loss(model, range(1)).backward()
        return found


def _loss(model: Any, ranks: range) -> torch.Tensor:
    losses = [model["last"](torch.tanh(model["first"](_batch(0, rank)))).square().mean() for rank in ranks]
    return torch.stack(losses).mean()


def test_gradients_in_parts_are_clipped_like_whole_ones_and_cannot_be_read() -> None:
    model, _ = _make()
    _loss(model, range(3)).backward()
    parameters = list(model.parameters())
    expected = [float(nn.utils.clip_grad_norm_(parameters, 1e9, order)) for order in (2.0, 1.0, float("inf"))]
    nn.utils.clip_grad_value_(parameters, 0.002)
    expected.append(float(nn.utils.clip_grad_norm_(parameters, 0.01)))
    expected.append(float(nn.utils.clip_grad_norm_(parameters, 1e9)))
    for found in run_ranks(3, _gradients_in_parts):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def _most_gradients() -> tuple[int, int, int]:
    """Bytes of gradients: at most during backward, after it on this rank, and of all parameters."""
    with joined(fusion_bytes=100_000):
        model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(9)))
        optimizer = torch.optim.Adam(model.parameters())
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard="gradients")
        seen = [0]
        for _ in range(2):
            seen.clear()  # the ranks agree on buckets at the end of the first backward pass
            hooks = [
                parameter.register_post_accumulate_grad_hook(lambda _: seen.append(_held(model)))
                for parameter in model.parameters()
            ]
            model(torch.ones(2, 300)).sum().backward()
            for hook in hooks:
                hook.remove()
            pieces = sum(piece.nbytes for one in model.parameters() for piece in one.grad.pieces)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return max(seen), pieces, sum(parameter.nbytes for parameter in model.parameters())


def _held(model: nn.Module) -> int:
    gradients = [parameter.grad for parameter in model.parameters()]
    return sum(one.nbytes for one in gradients if one is not None and not hasattr(one, "pieces"))


def test_gradients_are_freed_during_backward() -> None:
    for most, pieces, whole in run_ranks(3, _most_gradients):
        assert pieces == pytest.approx(whole / 3, rel=0.05)
        assert most < whole / 3  # a bucket is a ninth


DAMAGES: dict[str, tuple[Any, str]] = {
    "missing": (lambda state: state["state"][0].pop("exp_avg_sq"), r"parameter 0 \(0.weight\) has no 'exp_avg_sq'"),
    "number": (
        lambda state: state["state"][0].update(exp_avg=torch.tensor(0.0)),
        r"parameter 0 \(0.weight\) has 'exp_avg' of shape \[\] in place of \[5, 7\]",
    ),
    "empty": (
        lambda state: state["state"][2].update(exp_avg=torch.zeros(0)),
        r"parameter 2 \(1.weight\) has 'exp_avg' of shape \[0\] in place of \[3, 5\]",
    ),
    "turned": (
        lambda state: state["state"][2].update(exp_avg=torch.zeros(5, 3)),
        r"parameter 2 \(1.weight\) has 'exp_avg' of shape \[5, 3\] in place of \[3, 5\]",
    ),
    "sparse": (
        lambda state: state["state"][2].update(exp_avg=torch.zeros(3, 5).to_sparse()),
        r"parameter 2 \(1.weight\) has 'exp_avg' of the layout torch.sparse_coo in place of a dense tensor",
    ),
    "no tensor": (
        lambda state: state["state"][1].update(exp_avg="x"),
        r"parameter 1 \(0.bias\) has 'exp_avg' of type str in place of a tensor of shape \[5\]",
    ),
    "nothing": (lambda state: state["state"][1].update(exp_avg=None), r"parameter 1 \(0.bias\) has no 'exp_avg'"),
    "steps": (
        lambda state: state["state"][3].update(step=torch.zeros(3)),
        r"parameter 3 \(1.bias\) has 'step' of shape \[3\] in place of one number",
    ),
    "unknown": (lambda state: state["state"].update({9: {}}), r"entries of the parameters \[9\], which are in none"),
    "no groups": (lambda state: state.pop("param_groups"), "has no 'param_groups'; it has 'state'"),
    "no state": (lambda state: state.pop("state"), "has no 'state'; it has 'param_groups'"),
    "no params": (lambda state: state["param_groups"][0].pop("params"), "group 0 of .* has no 'params'"),
}


def _load_damaged() -> dict[str, str]:
    """Load damaged states, of which nothing is taken; returns the error of each."""
    with joined():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters(), shard="optimizer"
        )
        for step in range(2):
            model(_batch(step, hvd.rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = optimizer.state_dict()
        found, steps = {}, list[Any]()
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: steps.append(optimizer))
        for name, (damage, _) in DAMAGES.items():
            state = copy.deepcopy(whole)
            damage(state)
            state.get("param_groups", [{}])[0]["lr"] = 0.5
            with pytest.raises(ValueError) as error:
                optimizer.load_state_dict(state)
            found[name] = str(error.value)
            _equal(optimizer.state_dict(), whole)
        old = copy.deepcopy(whole)
        for entries in old["state"].values():
            entries["step"] = int(entries["step"])  # as old versions of torch
        optimizer.load_state_dict(old)
        _equal(whole, optimizer.state_dict())
        hook.remove()
        assert not steps, "to load is not to step"
        return found


def test_a_damaged_state_is_refused_on_all_ranks_before_anything_changes() -> None:
    for found in run_ranks(3, _load_damaged):
        for name, (_, message) in DAMAGES.items():
            assert re.search(message, found[name]), (name, found[name])
            assert "Load what state_dict() of an optimizer of the same class and parameters has" in found[name]


def _lose(lost: str) -> str:
    """Gather the state after all ranks have lost the slices of a parameter; returns the error."""
    with joined():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 2))
        model[2].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters(), shard="optimizer"
        )
        model(_batch(0, hvd.rank())).square().mean().backward()
        optimizer.step()
        for one in optimizer._hvdkit_shards._slices.pop(dict(model.named_parameters())[lost], ()):
            del optimizer.state[one.tensor]
        with pytest.raises(HorovodInternalError) as error:
            optimizer.state_dict()
        return str(error.value)


def test_a_parameter_of_which_no_rank_has_state_any_more_is_named() -> None:
    for message in run_ranks(3, _lose, "1.bias"):
        assert "no elements of the state of parameter 3 (1.bias): the ranks that had them have ended" in message
