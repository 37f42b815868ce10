"""Replicas that have drifted apart are noticed, and the tensor and the ranks are named."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from keras_ranks import each_backend, run_check
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.engine.replicate import ReplicaCheck, explain_difference
from hvdkit.errors import ConfigError, ReplicasDifferError
from hvdkit.torch.replicas import _on_device, checksums


def explain(*by_rank: dict[str, int]) -> str:
    return explain_difference([list(one.items()) for one in by_rank], lambda rank: f"rank {rank}")


def test_the_first_tensor_is_named_and_the_ranks_against_most() -> None:
    right = {"a": 1, "b": 2, "c": 3}
    told = explain(right, {**right, "b": 9, "c": 9}, right, {**right, "c": 7})
    assert "2 of 3 tensors differ, and the first one is b, where rank 1 differs from the other 3 ranks" in told


def test_rank_0_is_no_better_than_others() -> None:
    assert "rank 0 differs from the other 2 ranks" in explain({"a": 1}, {"a": 2}, {"a": 2})


def test_without_a_majority_none_is_blamed() -> None:
    assert "no two of the 2 ranks agree" in explain({"a": 1}, {"a": 2})
    assert "rank 2, rank 3 and rank 0, rank 1 differ and none has a majority" in explain(
        {"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}
    )


def test_ranks_with_different_tensors_are_told_that() -> None:
    assert "1 on rank 0, 2 on rank 2. The first difference is number 1: none on rank 0, b on rank 2." in explain(
        {"a": 1}, {"a": 1}, {"a": 1, "b": 2}
    )


def test_nothing_is_computed_between_checks() -> None:
    def computed() -> Any:
        raise AssertionError

    never, seldom = ReplicaCheck(None, "x", 0), ReplicaCheck(None, "x", 10)  # type: ignore[arg-type]
    for _ in range(9):
        never.stepped(computed)
        seldom.stepped(computed)
    never.stepped(computed, 100)
    with pytest.raises(AssertionError):
        seldom.stepped(computed)


TENSORS = {
    "empty": torch.zeros(0),
    "scalar": torch.tensor(1.5),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "half": torch.ones(3, 5, dtype=torch.bfloat16),
    "complex": torch.ones(3, dtype=torch.complex64),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "large": torch.arange((1 << 20) + 3, dtype=torch.float32),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("make", [lambda one: checksums([("x", one)])[0][1], lambda one: int(_on_device(one))])
def test_equal_tensors_have_equal_checksums_and_others_not(name: str, make: Any) -> None:
    tensor = TENSORS[name].clone()
    before = make(tensor)
    assert before == make(torch.nn.Parameter(tensor, requires_grad=False)) == make(tensor.contiguous())
    if not tensor.numel():
        return
    changed = tensor.contiguous().view(-1)
    changed[-1] += 1
    assert make(changed) != before
    if changed.numel() > 1:
        assert make(tensor.contiguous().view(-1).roll(1)) != before


def _trains(planted: bool) -> str:
    gc.collect()  # an optimizer of a test before, in a cycle, would be optimizer.1
    with joined(check_replicas=3):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        with pytest.raises(ConfigError, match="different numbers of steps"):
            hvd.join()
        for step in range(7):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            try:
                optimizer.step()
            except ReplicasDifferError as error:
                assert step == 5  # one check was before
                return str(error)
            if planted and step == 3 and hvd.rank() == 1:
                bias = model.get_parameter("1.bias").data
                bias[1] = torch.nextafter(bias[1], torch.tensor(9.0))  # the last bit
        return ""


@pytest.mark.ranks
def test_one_bit_on_one_rank_is_found_by_the_next_check() -> None:
    for told in run_ranks(3, _trains, True):
        assert (
            told.startswith("optimizer.1, step 6: the parameters differ between ranks: ") and "is 1.bias, where" in told
        )
        assert "where rank 1 (host " in told and "the other 2 ranks" in told
    assert run_ranks(3, _trains, False) == ["", "", ""]


@pytest.mark.slow
@pytest.mark.ranks
@each_backend
def test_fit_finds_it_too(backend: str) -> None:
    for told in run_check(3, backend, "keras_training:drift"):
        assert "step 6: the parameters differ between ranks: 1 of " in told and "is 3 out/bias, where" in told
        assert "where rank 1 (host " in told and "the other 2 ranks" in told
