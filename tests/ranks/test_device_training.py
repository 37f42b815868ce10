"""What trains in host memory trains alike by process groups of torch, and the order in which these begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from averaging import PeriodicAverage
from device_world import TORCH
from ranks import run_ranks
from torch_world import Case, Weights, assert_alike, joined, weights

import hvdkit.torch as hvd
from hvdkit.torch.device import groups
from hvdkit.torch.device.buckets import TorchBuckets
from hvdkit.torch.device.group import TorchGroup
from hvdkit.transport.coding.power_sgd import PowerSGD

pytestmark = [pytest.mark.ranks, pytest.mark.native("device memory is reduced by hvdkit's own engine")]

CASE = Case("SGD", {"lr": 0.05}, steps=7)
Wrap = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


def _wrap(**options: Any) -> Wrap:
    return lambda model, plain: hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


#: How an optimizer is wrapped, and whether its gradients stay in device memory.
WAYS: dict[str, tuple[Wrap, bool]] = {
    "Adasum": (_wrap(op=hvd.Adasum), False),
    "groups": (_wrap(num_groups=2), True),
    "predivided": (_wrap(gradient_predivide_factor=4.0), True),
    "a strategy of one's own": (lambda model, plain: _wrap(strategy=PeriodicAverage(3))(model, plain), False),
    "PowerSGD": (lambda model, plain: _wrap(compression=PowerSGD(2))(model, plain), False),
    "LocalSGD": (lambda model, plain: hvd.LocalSGD(plain, model=model, every=3), False),
    "DiLoCo": (lambda model, plain: hvd.DiLoCo(plain, model=model, every=3), False),
}


def _count() -> Any:
    return mock.patch.object(TorchGroup, "begin", autospec=True, side_effect=TorchGroup.begin)


def _train(way: str, settings: dict[str, Any]) -> tuple[Weights, int]:
    """The weights, and the number of operations in process groups of torch."""
    with joined(**settings), _count() as begun:
        model, plain = CASE.make()
        optimizer = WAYS[way][0](model, plain) or plain
        for step in range(CASE.steps):
            inputs, targets = CASE.batch(step, 0, hvd.size())
            mine = slice(hvd.rank() * CASE.rows, (hvd.rank() + 1) * CASE.rows)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        return weights(model), begun.call_count


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if at else way for at, way in enumerate(WAYS)]
)
def test_every_way_of_training_does_the_same_as_in_host_memory(way: str) -> None:
    plain, devices = run_ranks(3, _train, way, {}), run_ranks(3, _train, way, TORCH)
    for (expected, none), (found, begun) in zip(plain, devices, strict=True):
        assert none == 0 and (begun >= CASE.steps) == WAYS[way][1]
        for one, two in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-10)


def _drop(settings: dict[str, Any]) -> Weights:
    """All ranks have the same data, so that it does not matter whose gradients are dropped."""
    with joined(**settings):
        model, plain = CASE.make()
        optimizer = hvd.BackupSteps(plain, model.named_parameters(), 1, ahead=2)
        for step in range(CASE.steps):
            inputs, targets = CASE.batch(step, 0, 1)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        optimizer.finish()
        return weights(model)


@pytest.mark.slow
def test_backup_steps_do_the_same_as_in_host_memory() -> None:
    assert_alike(run_ranks(3, _drop, TORCH), run_ranks(3, _drop, {})[0], 1e-10)


class _Fork(torch.nn.Module):
    """Layers whose gradients come in an order that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (torch.nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The branch that is computed last has its gradient first."""
        hidden = self.first(inputs)
        order = (self.left, self.right) if hvd.rank() % 2 else (self.right, self.left)
        results = {layer: layer(hidden) for layer in order}
        total: torch.Tensor = self.last(results[order[1]] + results[order[0]].tanh())
        return total


def _order() -> tuple[list[str], list[str], list[int]]:
    """The gradients as they come in the last step, each bucket's begin between them, and the buckets alone."""
    seen: list[str] = []
    begun: list[int] = []

    def begin(buckets: TorchBuckets, index: int, *rest: Any) -> None:
        seen.append("begin")
        begun.append(index)
        plain(buckets, index, *rest)

    plain = TorchBuckets.begin
    with joined(**TORCH, fusion_bytes=200), mock.patch.object(TorchBuckets, "begin", begin):
        torch.manual_seed(0)
        model = _Fork()
        for name, weight in model.named_parameters():
            weight.register_hook(lambda _, name=name: seen.append(name.partition(".")[0]))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
        for _ in range(3):
            seen.clear()
            begun.clear()
            optimizer.zero_grad()
            model(torch.ones(2, 6)).square().sum().backward()
            backward = list(seen)
            optimizer.step()
        return backward, [each for each in seen if each != "begin"], begun


def test_buckets_begin_during_the_backward_pass_in_one_order_on_all_ranks() -> None:
    results = run_ranks(3, _order)
    for _, _, begun in results:
        assert begun == [0, 1, 2, 3]
    for backward, gradients, _ in results:
        assert gradients[0] == "last" and gradients[-1] == "first"
        assert backward[:2] == ["last", "begin"], "the first bucket begins before the second gradient is computed"
        assert backward.count("begin") == 4 and backward.index("first") > 2
    assert results[0][1] != results[1][1], "the order of the gradients differs"


def _traced(folder: str) -> None:
    with joined(**TORCH):
        hvd.allreduce(torch.ones(3))  # connects
        hvd.start_timeline(f"{folder}/{hvd.rank()}.json")
        hvd.allreduce(torch.ones(3), name="seen")
        hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(3), torch.ones(4)], name="grouped"))
        for name, call in (("seen", hvd.allgather), ("cast", hvd.alltoall), ("scattered", hvd.reducescatter)):
            call(torch.ones(3), name=name)
        hvd.allreduce(torch.ones(3, dtype=torch.int16), op=hvd.Sum, name="host")
        hvd.stop_timeline()


SPANS = {
    "allreduce.seen": ["GLOO_ALLREDUCE"],
    "allreduce.grouped": ["GLOO_ALLREDUCE"],
    "allgather.seen": ["GLOO_ALLGATHER"],
    "alltoall.cast": ["GLOO_ALLTOALL"],
    "reducescatter.scattered": ["GLOO_REDUCESCATTER"],
    "allreduce.host": ["ALLREDUCE"],
}


def test_the_timeline_names_the_library_of_an_operation(tmp_path: Path) -> None:
    run_ranks(3, _traced, str(tmp_path))
    for path in tmp_path.iterdir():
        events = json.loads(path.read_text())
        named = {event["args"]["name"]: event["pid"] for event in events if event.get("name") == "process_name"}
        for operation, expected in SPANS.items():
            own = [event for event in events if event.get("pid") == named[operation] and event["ph"] in "BE"]
            names = [event["name"] for event in own if event["ph"] == "B"]
            assert [name for name in names if "NEGOTIATE" not in name] == expected
            assert [event["ph"] for event in own] == ["B", "E"] * len(names)


def _train_in_turn(sums: str) -> None:
    """Each optimizer is given up before the next one is made; the last ones are kept, one of them on rank 1 only."""
    with joined(**TORCH, device_sums=sums):
        rank, mean = hvd.rank(), sum(range(1, hvd.size() + 1)) / hvd.size()
        seen, kept = [], []
        for turn in range(6):
            x = torch.nn.Parameter(torch.zeros(turn + 1))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)])
            (x * (rank + 1)).sum().backward()
            optimizer.step()
            assert x.tolist() == [-mean] * (turn + 1)
            if turn == 3 and rank == 1:
                kept.append(optimizer)
            if turn == 4:
                kept.append(optimizer)
            del optimizer, x
            seen.append(len(groups._groups))
        assert seen == [1, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("sums", ["library", "float32"])
def test_an_optimizer_takes_the_process_group_of_one_that_no_rank_has_any_more(sums: str) -> None:
    """A group has threads and sockets, with NCCL also device memory."""
    run_ranks(3, _train_in_turn, sums)
