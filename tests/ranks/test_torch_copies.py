"""copy.deepcopy, pickle and torch.save of a DistributedOptimizer: plain optimizers, which can be wrapped again."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch_world import Case, Weights, joined, train, train_here, weights

import hvdkit.torch as hvd

pytestmark = pytest.mark.ranks

CASES = {
    "SGD": Case("SGD", steps=3),
    "AdamW, float16 with a GradScaler": Case("AdamW", {"lr": 0.01}, dtype="float32", steps=3, autocast=True),
    "two passes, clipped": Case("SGD", steps=3, passes=2, clip=0.3),
}
#: Arguments of DistributedOptimizer, by name.
WRAPPED: dict[str, Callable[[], dict[str, Any]]] = {
    "gradients": dict,
    "coded": lambda: {"compression": hvd.Compression.TopK(0.1)},
    "Adasum": lambda: {"op": hvd.Adasum},
    "a process set": lambda: {"process_set": hvd.add_process_set([0, 1])},
}


def _deep(model: Any, optimizer: Any, scheduler: Any) -> Any:
    """A copy of what belongs together; the warning says that it is a plain optimizer."""
    with pytest.warns(UserWarning, match="returns a plain"):
        return copy.deepcopy((model, optimizer, scheduler))


def _pickled(*objects: Any) -> Any:
    return pickle.loads(pickle.dumps(objects))


def _saved(*objects: Any) -> Any:
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": _deep, "pickle": _pickled, "torch.save": _saved}


def _train_on(case: Case, model: Any, optimizer: Any, scheduler: Any, *, rank: int, of: int) -> Weights:
    train(case, model, optimizer, rank=rank, of=of, size=hvd.size())
    scheduler.step()
    return train(case, model, optimizer, rank=rank, of=of, size=hvd.size())


def _copies(case: Case, arguments: str, how: str) -> None:
    with joined():
        more = {**WRAPPED[arguments](), "backward_passes_per_step": case.passes}
        if more.get("process_set", hvd.global_process_set).included():
            _compare(case, more, how)
        hvd.barrier()


def _compare(case: Case, more: dict[str, Any], how: str) -> None:
    mine = {"rank": hvd.rank(), "of": more.get("process_set", hvd.global_process_set).size()}
    model, optimizer = case.make()
    own = type(optimizer)
    hvd.DistributedOptimizer(optimizer, model.named_parameters(), **more)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(case, model, optimizer, **mine, size=hvd.size())

    def copies() -> Any:
        return COPIES[how](model, optimizer, scheduler)

    if hvd.rank() == 0:
        copies()  # by one rank alone: no part of it is collective
    before = weights(model)
    alone, again = copies(), copies()
    assert type(alone[1]) is own and alone[2].optimizer is alone[1]
    assert alone[1].param_groups[0]["params"][0] is next(alone[0].parameters())
    reference_model, reference = case.make()  # what a plain optimizer of the same state does
    reference_model.load_state_dict(model.state_dict())
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rates = torch.optim.lr_scheduler.StepLR(reference, 1, 0.5)
    expected = _train_on(case, reference_model, reference, rates, rank=0, of=1)
    assert _equal(_train_on(case, *alone, rank=0, of=1), expected)
    assert _equal(weights(model), before)

    hvd.DistributedOptimizer(again[1], again[0].named_parameters(), **more)
    resumed = _train_on(case, *again, **mine)
    if "compression" not in more:  # what had not been sent yet stays with the first one
        assert _equal(resumed, _train_on(case, model, optimizer, scheduler, **mine))


def _equal(one: Weights, two: Weights) -> bool:
    return all((a == b).all() for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("case", CASES)
def test_a_copy_steps_as_a_plain_optimizer_and_wrapped_again_as_the_first(case: str, how: str) -> None:
    run_ranks(2, _copies, CASES[case], "gradients", how)


CODED = pytest.param("coded", 2, marks=pytest.mark.native("Horovod has no codings"))


@pytest.mark.parametrize(("arguments", "size"), [CODED, ("Adasum", 2), ("a process set", 3)])
@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_copies_of_what_is_wrapped_otherwise(arguments: str, size: int, how: str) -> None:
    run_ranks(size, _copies, CASES["SGD"], arguments, how)


def _write(folder: str) -> None:
    with joined():
        model, optimizer = CASES["SGD"].make()
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
        train(CASES["SGD"], model, optimizer, rank=hvd.rank(), of=hvd.size(), size=hvd.size())
        torch.save((model, optimizer), Path(folder, f"{hvd.rank()}.pt"))


READ = """
import sys
sys.modules["hvdkit"] = None  # as where it is not installed
import torch
model, optimizer = torch.load("0.pt", weights_only=False)
assert type(optimizer) is torch.optim.SGD and len(optimizer.state) == 4, optimizer
before = model[0].weight.detach().clone()
model(torch.ones(3, 12, dtype=torch.float64)).sum().backward()
optimizer.step()
assert not torch.equal(model[0].weight, before)
"""


def test_a_saved_optimizer_is_loaded_where_hvdkit_is_not_installed(tmp_path: Path) -> None:
    run_ranks(2, _write, str(tmp_path))
    subprocess.run([sys.executable, "-c", READ], cwd=tmp_path, check=True, timeout=60)


def _made_of_the_class() -> None:
    with joined():
        for arguments in ("gradients", "Adasum"):
            model, optimizer = CASES["SGD"].make()
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), **WRAPPED[arguments]())
            other, plain = CASES["SGD"].make()
            another: Any = type(optimizer)(other.parameters(), **CASES["SGD"].options)
            expected = train_here(CASES["SGD"], 1)
            assert _equal(train(CASES["SGD"], other, another, rank=0, of=1, size=1), expected)
            hvd.DistributedOptimizer(another, other.named_parameters(), **WRAPPED[arguments]())
            train(CASES["SGD"], other, another, rank=hvd.rank(), of=2, size=2)
            assert isinstance(another, type(plain)) and len(type(another).__mro__) == len(type(optimizer).__mro__)


def test_what_a_script_makes_of_the_class_is_plain_and_can_be_wrapped() -> None:
    run_ranks(2, _made_of_the_class)
