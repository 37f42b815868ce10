"""hvd.LocalSGD and hvd.DiLoCo: what ranks train is what a simulation of them does in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch_world import Case, Weights, assert_alike, joined, train_here, weights

import hvdkit.torch as hvd
from hvdkit.engine.planned.reducer import BucketReducer
from hvdkit.errors import RankLostError
from hvdkit.strategies.outer import OuterSGD

pytestmark = pytest.mark.ranks

ADAM = Case("AdamW", {"lr": 0.01})
SGD = Case("SGD", {"lr": 0.05})


def _wrap(optimizer: torch.optim.Optimizer, kind: str, arguments: dict[str, Any]) -> Any:
    return getattr(hvd, kind)(optimizer, **arguments)


def _step(case: Case, model: torch.nn.Module, optimizer: Any, step: int, rank: int, size: int) -> None:
    inputs, targets = case.batch(step, 0, size)
    mine = slice(rank * case.rows, (rank + 1) * case.rows)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
    optimizer.step()


def _train(
    case: Case, kind: str, arguments: dict[str, Any], *, restart_after: int = -1, network: str = "auto"
) -> tuple[Weights, Weights]:
    """The parameters at the end, and what they are after synchronize_parameters().

    restart_after: after so many steps all goes on in a new optimizer with the saved state, of each rank.
    """
    with joined(network):
        model, plain = case.make()
        optimizer = _wrap(plain, kind, {"model": model, **arguments})
        for step in range(case.steps):
            if step == restart_after:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model, plain = case.make()
                optimizer = _wrap(plain, kind, {"model": model, **arguments})
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            _step(case, model, optimizer, step, hvd.rank(), hvd.size())
        before = weights(model)
        optimizer.synchronize_parameters()
        optimizer.synchronize_parameters()  # which changes nothing more
        return before, weights(model)


def _simulate(
    case: Case,
    size: int,
    every: int,
    outer: tuple[float, float] = (1.0, 0.0),
    *,
    start_after: int = 0,
    parts: Sequence[Sequence[int]] = ((0, 1, 2, 3),),
    overlap: int = 0,
) -> list[Weights]:
    """What each rank's parameters are, by a loop over ranks in this process. parts: tensors of each fragment."""
    torch.set_num_threads(1)
    pairs = [case.make() for _ in range(size)]
    shared: Any = [parameter.detach().clone() for parameter in pairs[0][0].parameters()]
    velocity = [torch.zeros_like(tensor) for tensor in shared]
    under_way: list[tuple[int, int, list[torch.Tensor], list[torch.Tensor]]] = []  # step, tensor, sent by rank, changes
    for step in range(1, case.steps + 1):
        local = step - start_after
        for rank, (model, optimizer) in enumerate(pairs):
            if local > 0:
                _step(case, model, optimizer, step - 1, rank, size)
            else:
                inputs, targets = case.batch(step - 1, 0, size)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        lists = [list(model.parameters()) for model, _ in pairs]
        if local <= 0:
            shared = [parameter.detach().clone() for parameter in lists[0]]
            continue
        for part, indices in enumerate(parts):
            if (local - 1) % every + 1 == (part + 1) * every // len(parts):
                for index in indices:
                    sent = [one[index].detach().clone() for one in lists]
                    under_way.append((step + overlap, index, sent, [own - shared[index] for own in sent]))
        with torch.no_grad():
            for due, index, sent, changes in under_way:
                if due == step:
                    change = sum(changes[1:], changes[0]) / size
                    velocity[index] = outer[1] * velocity[index] + change
                    shared[index] = shared[index] + outer[0] * (change + outer[1] * velocity[index])
                    for one, before in zip(lists, sent, strict=True):
                        one[index].copy_(shared[index] + (one[index] - before))
        under_way = [each for each in under_way if each[0] > step]
    return [weights(model) for model, _ in pairs]


def _assert_close(results: Sequence[Weights], expected: Sequence[Weights], tolerance: float) -> None:
    for result, reference in zip(results, expected, strict=True):
        for one, two in zip(result, reference, strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=tolerance)


def _assert_equal(results: Sequence[Weights]) -> None:
    for result in results[1:]:
        for one, two in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_meeting_after_each_step_of_sgd_is_synchronous_training() -> None:
    results = run_ranks(3, _train, Case("SGD", dtype="float32"), "LocalSGD", {"every": 1})
    assert_alike([after for after, _ in results], train_here(Case("SGD", dtype="float32"), 3), 1e-6)


@pytest.mark.native("nothing here depends on the engine")
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_on_fewer_ranks(size: int) -> None:
    results = run_ranks(size, _train, SGD, "LocalSGD", {"every": 1})
    assert_alike([after for after, _ in results], train_here(SGD, size), 1e-10)


# In the order of the sizes of tensors: 12x20, 20, 20x5, 5.
HALVES = ((0,), (1, 2, 3))


@pytest.mark.parametrize(
    ("kind", "arguments", "simulated"),
    [
        ("DiLoCo", {"every": 6}, {"every": 6, "outer": (0.7, 0.9)}),
        pytest.param("LocalSGD", {"every": 4}, {"every": 4}, marks=pytest.mark.slow),
        pytest.param(
            "DiLoCo",
            {"every": 5, "outer": hvd.OuterSGD(1.0, 0.0)},
            {"every": 5},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "LocalSGD", {"every": 4, "start_after": 7}, {"every": 4, "start_after": 7}, marks=pytest.mark.slow
        ),
        (
            "DiLoCo",
            {"every": 6, "fragments": 2, "overlap": 2, "start_after": 3},
            {"every": 6, "outer": (0.7, 0.9), "parts": HALVES, "overlap": 2, "start_after": 3},
        ),
        pytest.param(
            "DiLoCo",
            {"every": 4, "fragments": 2, "overlap": 3},
            {"every": 4, "outer": (0.7, 0.9), "parts": HALVES, "overlap": 3},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_train_as_their_simulation(kind: str, arguments: dict[str, Any], simulated: dict[str, Any]) -> None:
    results = run_ranks(3, _train, ADAM, kind, arguments)
    _assert_close([before for before, _ in results], _simulate(ADAM, 3, **simulated), 1e-10)
    _assert_equal([after for _, after in results])


@pytest.mark.native("nothing here depends on the engine")
@pytest.mark.parametrize("restart_after", [6, 8])
def test_a_restart_changes_no_bit(restart_after: int) -> None:
    case = Case("AdamW", {"lr": 0.01}, dtype="float32", steps=13)
    arguments = {"every": 6, "fragments": 2}
    plain = run_ranks(2, _train, case, "DiLoCo", arguments)
    again = run_ranks(2, _train, case, "DiLoCo", arguments, restart_after=restart_after)
    for one, two in zip(plain, again, strict=True):
        _assert_equal([one[0], two[0]])
        _assert_equal([one[1], two[1]])


@pytest.mark.native("nothing here depends on the engine")
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        pytest.param("fp16", 1e-3, marks=pytest.mark.slow),
        pytest.param("bf16", 8e-3, marks=pytest.mark.slow),
        ("Int8", 0.04),
    ],
)
def test_narrow_changes_between_hosts_stay_within_a_tolerance(name: str, tolerance: float) -> None:
    compression = getattr(hvd.Compression, name)
    case = Case("SGD", {"lr": 0.05}, dtype="float32", steps=12)
    arguments = {"every": 4, "compression": compression() if name == "Int8" else compression}
    results = run_ranks(3, _train, case, "LocalSGD", arguments, network="mpi")
    expected = _simulate(case, 3, 4)
    moved = max(np.abs(one - two).max() for one, two in zip(expected[0], weights(case.make()[0]), strict=True))
    _assert_close([after for _, after in results], expected, tolerance * moved)
    _assert_equal([after for _, after in results])
    assert any((one != two).any() for one, two in zip(results[0][1], expected[0], strict=True))


def _bfloat16() -> list[list[float]]:
    """Steps of which 16 bits keep nothing alone: the shared values in float32 do."""
    with joined():
        parameter = torch.nn.Parameter(torch.full((3,), 256.0, dtype=torch.bfloat16))
        optimizer = hvd.DiLoCo(torch.optim.SGD([parameter], 1.0), every=1, outer=hvd.OuterSGD(0.1, 0.0))
        for _ in range(20):
            parameter.grad = torch.full((3,), -2.0, dtype=torch.bfloat16)
            optimizer.step()
        shared = optimizer.strategy.state_dict()["shared"]["group.0.0"]
        return [parameter.float().tolist(), shared.tolist()]


@pytest.mark.native("nothing here depends on the engine")
@pytest.mark.slow
def test_shared_values_of_bfloat16_are_float32() -> None:
    for values, shared in run_ranks(2, _bfloat16):
        np.testing.assert_allclose(shared, 260.0, rtol=1e-5)
        assert values == [260.0] * 3


def _in_particular() -> None:
    with joined():
        rank, size = hvd.rank(), hvd.size()
        with pytest.raises(ValueError, match="every is 0"):
            hvd.LocalSGD(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1), every=0)
        with pytest.raises(TypeError, match=r"compression='int4' is not supported; use .*Int8\(\)"):
            hvd.DiLoCo(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1), compression="int4")  # type: ignore[arg-type]
        too_many = hvd.LocalSGD(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1), every=2, fragments=2)
        with pytest.raises(ValueError, match="only 1 tensors"):
            too_many.step()

        # Buffers of floating point are averaged with the parameters, in the end.
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        plain = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.LocalSGD(plain, model=model, every=4)
        buffer = model.get_buffer("1.running_mean")
        with torch.no_grad():
            buffer.fill_(float(rank))
        optimizer.synchronize_parameters()
        assert buffer.tolist() == [(size - 1) / 2] * 2

        # Ranks that begin with different parameters go on from the average; a plain optimizer's state is loaded.
        parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
        optimizer = hvd.LocalSGD(torch.optim.SGD([parameter], 1.0), every=2)
        optimizer.load_state_dict(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 1.0).state_dict())
        for _ in range(2):
            parameter.grad = torch.full((2,), -1.0)
            optimizer.step()
        assert parameter.tolist() == [(size - 1) / 2 + 2] * 2
        torch.optim.SGD([parameter], 1.0).load_state_dict(optimizer.state_dict())

        # The state of rank 0, with what it has not averaged yet, goes to the others.
        optimizer = hvd.DiLoCo(torch.optim.SGD([parameter], 1.0), every=4, overlap=2)
        for step in range(10):
            if step == 5:  # while an average is under way
                hvd.broadcast_parameters({"parameter": parameter.data}, root_rank=0)
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            parameter.grad = torch.full((2,), float(rank))
            optimizer.step()
        optimizer.synchronize_parameters()
        states = hvd.allgather_object(optimizer.strategy.state_dict())
        for state in states[1:]:
            np.testing.assert_equal(state, states[0])

        # Ranks that have taken different numbers of steps are told both.
        optimizer = hvd.LocalSGD(torch.optim.SGD([parameter], 1.0), every=4)
        for _ in range(1 + rank):
            parameter.grad = torch.ones(2)
            optimizer.step()
        with pytest.raises(hvd.HorovodInternalError, match=r"steps.*\b1\b.*\b2\b|steps.*\b2\b.*\b1\b"):
            optimizer.synchronize_parameters()
        optimizer = hvd.LocalSGD(torch.optim.SGD([parameter], 1.0), every=2)
        with pytest.raises(hvd.HorovodInternalError, match=r"steps.*\b1\b.*\b2\b|steps.*\b2\b.*\b1\b"):
            for _ in range(1 + rank):  # the last one is in a meeting then
                parameter.grad = torch.ones(2)
                optimizer.step()
            optimizer.synchronize_parameters()


@pytest.mark.native("nothing here depends on the engine")
def test_in_particular() -> None:
    run_ranks(2, _in_particular)


def _unchanged() -> list[bool]:
    with joined():
        start = torch.randn(1000, generator=torch.Generator().manual_seed(1))
        trained, unused = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
        optimizer = hvd.LocalSGD(torch.optim.SGD([trained, unused], 0.1), every=2)
        for _ in range(6):
            trained.grad = torch.full_like(trained, float(hvd.rank()))
            optimizer.step()
        return [torch.equal(parameter, start) for parameter in (trained, unused)]


@pytest.mark.native("nothing here depends on the engine")
def test_a_parameter_that_no_rank_changes_keeps_its_bits() -> None:
    """A mean of equal numbers need not be that number on three ranks: one in seven of these would change."""
    assert run_ranks(3, _unchanged) == [[False, True]] * 3


def _interrupted() -> None:
    with joined(fusion_bytes=0):  # a bucket for each parameter
        rank = hvd.rank()
        parameters = [torch.nn.Parameter(torch.full((3,), float(index))) for index in range(4)]
        optimizer = hvd.LocalSGD(torch.optim.SGD(parameters, 1.0), every=1)
        drain = BucketReducer._drain_oldest
        drained: list[BucketReducer] = []

        def fail_in_the_second(reducer: BucketReducer) -> None:
            if len(drained) == 1:
                raise RankLostError("Rank 3 was lost.")
            drained.append(reducer)
            drain(reducer)

        def step() -> None:
            for parameter in parameters:
                parameter.grad = torch.full((3,), -float(rank))
            optimizer.step()

        step()
        mean = (hvd.size() - 1) / 2
        assert [one.tolist() for one in parameters] == [[index + mean] * 3 for index in range(4)]
        with (
            mock.patch.object(BucketReducer, "_drain_oldest", fail_in_the_second),
            pytest.raises(RankLostError, match="Rank 3 was lost"),
        ):
            step()
        assert len(drained) == 1
        assert [one.tolist() for one in parameters] == [[index + mean + rank] * 3 for index in range(4)]


@pytest.mark.native("the average is one of hvdkit's own buckets")
def test_an_average_that_a_lost_rank_interrupts_leaves_every_parameter_as_it_was() -> None:
    """One bucket's average is there when the error is raised; a model of which a part is averaged is nobody's."""
    run_ranks(3, _interrupted)


def _without_a_step() -> None:
    with joined():
        rank = hvd.rank()
        parameter = torch.nn.Parameter(torch.ones(2))
        cure = r"give every rank as many batches .*, and leave out hvd\.join\(\)"
        optimizer = hvd.LocalSGD(torch.optim.SGD([parameter], 1.0), every=4)
        with pytest.raises(hvd.HorovodInternalError, match=f"steps: rank 0 .* has 0, rank 1 .* has 3.*{cure}"):
            for _ in range(3 * rank):
                parameter.grad = torch.ones(2)
                optimizer.step()
            optimizer.synchronize_parameters()
        for start_after in (0, 1):
            optimizer = hvd.LocalSGD(torch.optim.SGD([parameter], 1.0), every=1, start_after=start_after)
            if rank:
                parameter.grad = torch.ones(2)
                with pytest.raises(hvd.HorovodInternalError, match=rf"rank 0 .* has joined.*{cure}"):
                    optimizer.step()
            hvd.join()


@pytest.mark.native("nothing here depends on the engine")
def test_a_rank_without_a_step_is_an_error_that_says_what_all_ranks_need() -> None:
    run_ranks(2, _without_a_step)


def _different_settings() -> str:
    with joined():
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.LocalSGD(torch.optim.SGD([parameter], 1.0), every=2 + hvd.rank())
        parameter.grad = torch.ones(2)
        with pytest.raises(Exception, match="every 3 steps") as caught:
            optimizer.step()
        return type(caught.value).__name__


@pytest.mark.native("nothing here depends on the engine")
@pytest.mark.slow
def test_ranks_that_meet_at_different_steps_are_told() -> None:
    assert run_ranks(2, _different_settings) == ["PlanMismatchError"] * 2


@pytest.mark.native("no engine takes part")
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_step_is_that_of_torch(nesterov: bool) -> None:
    outer, random = OuterSGD(0.7, 0.9, nesterov), np.random.RandomState(1)
    values, velocity = random.randn(7), np.zeros(7)
    parameter = torch.nn.Parameter(torch.tensor(values))
    reference = torch.optim.SGD([parameter], 0.7, momentum=0.9, nesterov=nesterov)
    for _ in range(4):
        change = random.randn(7)
        parameter.grad = torch.tensor(-change)
        reference.step()
        outer.step(values, change, velocity)
        np.testing.assert_allclose(values, parameter.detach().numpy(), rtol=0, atol=1e-12)
