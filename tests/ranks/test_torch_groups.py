"""`groups` and `num_groups`: gradients that are reduced together, and what cannot be a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import product
from ranks import run_ranks
from torch import nn
from torch_world import Case, Weights, assert_alike, joined, train, train_here

import hvdkit.torch as hvd
from hvdkit.torch.groups import number_groups


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))


def _numbers(model: nn.Module, groups: Any, num_groups: int = 0) -> list[int | None]:
    made = number_groups(list(model.named_parameters()), groups, num_groups)
    return [made.get(id(parameter)) for parameter in model.parameters()]


def test_groups_are_numbered_as_they_are_given() -> None:
    model = _model()
    first, second, third, *_, last = model.parameters()
    assert _numbers(model, None) == [None] * 6
    assert _numbers(model, 0) == [None] * 6
    assert _numbers(model, 4) == [0, 0, 1, 1, 2, 3]
    assert _numbers(model, 9) == [0, 1, 2, 3, 4, 5]
    assert _numbers(model, [[first, last], [third]]) == [0, None, 1, None, None, 0]
    first.requires_grad_(False)
    second.requires_grad_(False)
    assert _numbers(model, 2) == [None, None, 0, 0, 1, 1]


def test_num_groups_is_the_older_name() -> None:
    with pytest.warns(DeprecationWarning, match="groups"):
        assert _numbers(_model(), None, 2) == [0, 0, 0, 1, 1, 1]
    with pytest.warns(DeprecationWarning):
        assert _numbers(_model(), 3, 2) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("groups", [-1, True, "all", 1.5, [3], [["0.weight"]], ({},)])
def test_what_is_no_group_is_refused(groups: Any) -> None:
    with pytest.raises(ValueError, match="groups"):
        _numbers(_model(), groups)


def test_a_parameter_in_two_groups_is_refused() -> None:
    model = _model()
    first, second, *_ = model.parameters()
    with pytest.raises(ValueError, match=r"0\.weight is in group 0 and in group 1"):
        _numbers(model, [[first, second], [first]])


def _train(case: Case, which: str, fusion_bytes: int) -> Weights:
    with joined(fusion_bytes=fusion_bytes):
        model, plain = case.make()
        parameters = list(model.parameters())
        groups: dict[str, Any] = {
            "two": 2,
            "far apart": [[parameters[0], parameters[-1]]],
            "all": [parameters],
            "each": [[parameter] for parameter in parameters],
        }
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), backward_passes_per_step=case.passes, groups=groups[which]
        )
        return train(case, model, optimizer, rank=hvd.rank(), of=hvd.size(), size=hvd.size())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("which", "fusion_bytes"),
    product(
        ["two", "far apart", "all", "each"],
        [0, 512, 2**22],
        quick=lambda which, fusion_bytes: which == "far apart" or fusion_bytes == 512,
    ),
)
def test_groups_change_no_result(which: str, fusion_bytes: int) -> None:
    case = Case(steps=4, passes=2)
    assert_alike(run_ranks(2, _train, case, which, fusion_bytes), train_here(case, 2), 1e-12)


def _sent_when_last_gradient_comes(groups: bool) -> list[bool]:
    """Of three layers in a chain, has the last one's gradient been sent when the first one's has not come?"""
    with joined(fusion_bytes=0):
        model = _model()
        parameters = list(model.parameters())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, 0.1), groups=[[parameters[0], parameters[4], parameters[5]]] if groups else None
        )
        seen: list[bool] = []
        for _ in range(2):
            optimizer.zero_grad()
            hidden = model[0](torch.ones(3, 4))
            hidden.register_hook(lambda _: seen.append(_reduced(optimizer)))
            model[2](model[1](hidden)).sum().backward()
            optimizer.step()
        return seen


def _reduced(optimizer: Any) -> bool:
    reducer = optimizer._hvdkit.strategy._reducer
    return reducer is not None and reducer.started(5)


@pytest.mark.native("Horovod fuses what is ready")
@pytest.mark.ranks
def test_no_gradient_of_a_group_is_sent_before_all_are_there() -> None:
    assert run_ranks(2, _sent_when_last_gradient_comes, False) == [[False, True]] * 2
    assert run_ranks(2, _sent_when_last_gradient_comes, True) == [[False, False]] * 2


def test_a_list_of_ranks_is_no_process_set() -> None:
    ranks: Any = [0]
    with joined():
        one = torch.ones(1)
        for call in (
            lambda: hvd.allreduce(one, process_set=ranks),
            lambda: hvd.grouped_allreduce([one], compression=hvd.Compression.fp16, process_set=ranks),
            lambda: hvd.allgather(one, process_set=ranks),
            lambda: hvd.broadcast(one, 0, process_set=ranks),
            lambda: hvd.alltoall(one, process_set=ranks),
            lambda: hvd.reducescatter(one, process_set=ranks),
            lambda: hvd.barrier(process_set=ranks),
            lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(one)], 1.0), process_set=ranks),
        ):
            with pytest.raises(TypeError, match=r"process_set is \[0\], but it must be an hvd.ProcessSet"):
                call()
