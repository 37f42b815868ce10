"""Ranks whose plans differ are told so, all of them, with both sides of every difference."""

from __future__ import annotations

import pytest
from ranks import RanksFailedError, run_ranks

from hvdkit.engine.planned.agreement import check_agreement, explain_mismatch
from hvdkit.engine.planned.plan import TensorSpec, describe_plan
from hvdkit.errors import HorovodInternalError, PlanMismatchError
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import gather_ints

WEIGHT, BIAS = TensorSpec("fc.weight", 20, "float32"), TensorSpec("fc.bias", 2, "float32")


def plan(*tensors: TensorSpec, limit: int = 1024) -> str:
    return describe_plan(tensors, limit, "average")


def test_a_tensor_that_differs_is_shown_from_both_sides() -> None:
    other = plan(WEIGHT, TensorSpec("fc.bias", 3, "float32"))
    assert explain_mismatch([plan(WEIGHT, BIAS), other, plan(WEIGHT, BIAS), other]).splitlines() == [
        "The ranks do not hold the same parameters, so their gradients cannot be reduced.",
        "ranks 0, 2: 2 tensors; ranks 1, 3: 2 tensors.",
        "  tensor 1: ranks 0, 2 has fc.bias float32[2]; ranks 1, 3 has fc.bias float32[3]",
        "Build the model, and wrap the optimizer, from the same configuration on every rank.",
    ]


def test_a_tensor_that_only_some_ranks_have_is_named() -> None:
    longer, shorter = plan(WEIGHT, BIAS), plan(WEIGHT)
    text = explain_mismatch([longer, shorter])
    assert "rank 0: 2 tensors; rank 1: 1 tensors." in text
    assert "tensor 1: rank 0 has fc.bias float32[2]; rank 1 has nothing" in text
    assert "tensor 1: rank 0 has nothing; rank 1 has fc.bias float32[2]" in explain_mismatch([shorter, longer])


def test_settings_that_differ_are_called_settings() -> None:
    text = explain_mismatch([plan(WEIGHT), plan(WEIGHT, limit=2048)])
    assert "settings: rank 0 has buckets of 1024 bytes, average; rank 1 has buckets of 2048 bytes, average" in text
    assert "tensor 0" not in text


def test_place_and_layout_are_told_apart() -> None:
    text = explain_mismatch([plan(WEIGHT), plan(TensorSpec("fc.weight", 20, "float32", place=1, layout="(5, 4)"))])
    assert "rank 0 has fc.weight float32[20]; rank 1 has fc.weight float32[20] (5, 4) device 1" in text


def test_each_group_of_ranks_is_compared_with_rank_0() -> None:
    text = explain_mismatch([plan(WEIGHT), plan(BIAS), plan(WEIGHT, BIAS)])
    assert "tensor 0: rank 0 has fc.weight float32[20]; rank 1 has fc.bias float32[2]" in text
    assert "tensor 1: rank 0 has nothing; rank 2 has fc.bias float32[2]" in text


@pytest.mark.parametrize("count", [5, 6, 7, 50])
def test_of_many_differences_six_are_shown(count: int) -> None:
    one, two = ([TensorSpec(f"{name}{at}", 1, "float32") for at in range(count)] for name in "ab")
    lines = explain_mismatch([plan(*one), plan(*two)]).splitlines()
    assert sum("tensor " in line for line in lines) == min(count, 6)
    assert ("  ..." in lines) == (count > 6)


def agree(transport: Transport, described: list[str]) -> tuple[str, list[int]]:
    """What this rank is told; and that the ranks can go on with each other."""
    message = ""
    try:
        check_agreement(transport, described[transport.rank])
    except PlanMismatchError as error:
        message = str(error)
    return message, gather_ints(transport, transport.rank)


@pytest.mark.ranks
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_every_rank_is_told_the_same_when_one_differs(odd: int) -> None:
    described = [plan(WEIGHT, BIAS) if rank != odd else plan(WEIGHT) for rank in range(3)]
    answers = run_ranks(3, agree, described, transport="mpi")
    assert [message for message, _ in answers] == [explain_mismatch(described)] * 3
    assert all(gathered == [0, 1, 2] for _, gathered in answers)


@pytest.mark.ranks
def test_ranks_that_agree_are_told_nothing() -> None:
    assert [message for message, _ in run_ranks(3, agree, [plan(WEIGHT, BIAS)] * 3, transport="mpi")] == [""] * 3


@pytest.mark.ranks
def test_names_in_any_language_are_compared() -> None:
    described = [plan(TensorSpec(name, 1, "float32")) for name in ("größe", "大きさ")]
    assert all(
        "größe" in message and "大きさ" in message for message, _ in run_ranks(2, agree, described, transport="mpi")
    )


def fail_to_agree(transport: Transport) -> None:
    check_agreement(transport, f"settings\ntensor of rank {transport.rank}")


@pytest.mark.ranks
def test_the_error_is_one_that_horovod_scripts_catch() -> None:
    assert issubclass(PlanMismatchError, HorovodInternalError)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, fail_to_agree, transport="mpi")
    assert set(caught.value.tracebacks) == {0, 1}
