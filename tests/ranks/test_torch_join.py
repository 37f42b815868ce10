"""Ranks with different numbers of batches: who has no more gives zeros to the optimizers of the others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import product
from ranks import RanksFailedError, run_ranks
from torch import nn
from torch_world import Weights, joined, weights

import hvdkit.torch as hvd
from hvdkit.engine import runtime as engine
from hvdkit.errors import HorovodInternalError


def _on(size: int, body: Callable[..., Any], *args: Any, over: str = "auto", **settings: Any) -> list[Any]:
    return run_ranks(size, _joined, body, args, {"transport": over, **settings}, timeout=60)


def _joined(body: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    with joined(**settings):
        return body(*args)


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2)).double()


def _loss(model: nn.Module, epoch: int, batch: int, rank: int, window: int = 0) -> torch.Tensor:
    seed = 10_000 * epoch + 100 * batch + 10 * rank + window
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _expected(batches: Sequence[int], epochs: int, passes: int = 1) -> list[list[Weights]]:
    """For each epoch and rank the parameters at that rank's last step, computed in one process."""
    model = _model()
    optimizer = _sgd(model)
    found: list[list[Weights]] = []
    for epoch in range(epochs):
        after = [weights(model)]
        for batch in range(max(batches)):
            optimizer.zero_grad()
            for rank, count in enumerate(batches):
                for window in range(passes if batch < count else 0):
                    (_loss(model, epoch, batch, rank, window) / len(batches)).backward()
            optimizer.step()
            after.append(weights(model))
        found.append([after[count] for count in batches])
    return found


def _train(batches: Sequence[int], epochs: int, passes: int) -> list[tuple[int, Weights, Weights]]:
    rank, found = hvd.rank(), []
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), backward_passes_per_step=passes)
    for epoch in range(epochs):
        for batch in range(batches[rank]):
            optimizer.zero_grad()
            for window in range(passes):
                _loss(model, epoch, batch, rank, window).backward()
            optimizer.step()
        mine, state = weights(model), copy.deepcopy(optimizer.state_dict())
        last = hvd.join()
        assert str(optimizer.state_dict()) == str(state)
        found.append((last, mine, weights(model)))
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    return found


def _check(results: list[Any], batches: Sequence[int], passes: int = 1) -> None:
    expected = _expected(batches, len(results[0]), passes)
    for rank, epochs in enumerate(results):
        for epoch, (last, mine, after) in enumerate(epochs):
            assert last == results[0][epoch][0]
            assert batches[last] == max(batches)
            for one, two, three in zip(mine, after, expected[epoch][rank], strict=True):
                np.testing.assert_array_equal(one, two)  # joining changes nothing here
                np.testing.assert_allclose(one, three, rtol=0, atol=1e-10)


BATCHES = {1: [3], 2: [2, 5], 3: [4, 1, 2], 4: [3, 1, 0, 5]}
#: One of the four ranks has no batch at all.
NO_FIRST_STEP = pytest.param(4, marks=pytest.mark.native("on Horovod's core all ranks take the first step"))
WAYS = ["shared_memory", "mpi", "hierarchical_pairs", "hierarchical_uneven"]


@pytest.mark.parametrize(
    ("over", "progress"),
    product(
        WAYS,
        ["inline", "thread"],
        quick=lambda over, progress: (
            over == "shared_memory" or (progress == "inline") == (over == "hierarchical_pairs")
        ),
    ),
)
@pytest.mark.parametrize("size", [2, 3, NO_FIRST_STEP])
def test_a_joined_rank_counts_as_zeros(size: int, over: str, progress: str) -> None:
    settings = {"progress": progress, "fusion_bytes": 2048, "buckets_in_flight": 2}
    _check(_on(size, _train, BATCHES[size], 3, 1, over=over, **settings), BATCHES[size])


def test_one_process_joins_itself() -> None:
    _check(_on(1, _train, BATCHES[1], 2, 1), BATCHES[1])


@pytest.mark.parametrize("over", ["shared_memory", "mpi"])
def test_windows_of_several_passes(over: str) -> None:
    _check(_on(3, _train, BATCHES[3], 2, 2, over=over), BATCHES[3], passes=2)


@pytest.mark.native("buckets")
@pytest.mark.parametrize("fusion_bytes", [0, 2**22])
def test_a_bucket_for_all_and_one_for_each(fusion_bytes: int) -> None:
    _check(_on(3, _train, [0, 3, 1], 2, 1, fusion_bytes=fusion_bytes), [0, 3, 1])


def _alone(seed: int, steps: int, factor: float) -> Weights:
    model = _model(seed)
    optimizer = _sgd(model)
    for batch in range(steps):
        optimizer.zero_grad()
        (_loss(model, 0, batch, 0) * (1 if batch == 0 else factor)).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.native("Horovod's join is of the set of all ranks")
@pytest.mark.parametrize("over", ["shared_memory", "mpi"])
def test_several_optimizers_and_one_of_a_process_set(over: str) -> None:
    results = _on(3, _several, over=over)
    for first, second, third in results:
        assert (first, second, third) == ("alike", "alike", "alike")


def _several() -> tuple[str, str, str]:
    """Rank 0 has one batch, and the others three: from then on a third is missing, and on the pair a half."""
    rank, steps = hvd.rank(), [1, 3, 3][hvd.rank()]
    pair = hvd.add_process_set([0, 1])
    models = [_model(1), _model(2), _model(3)]
    optimizers = [
        hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), process_set=which)
        for model, which in zip(models, (hvd.global_process_set, hvd.global_process_set, pair), strict=True)
    ]
    for batch in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            _loss(model, 0, batch, 0).backward()
            optimizer.step()
    assert hvd.join() in (1, 2)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 3
    found = []
    for at, model in enumerate(models):
        factor = 2 / 3 if at < 2 else (1 / 2 if rank < 2 else 1)
        pairs = zip(weights(model), _alone(at + 1, steps, factor), strict=True)
        found.append("alike" if all(np.allclose(one, two, rtol=0, atol=1e-10) for one, two in pairs) else "different")
    return found[0], found[1], found[2]


def _sparse(batches: Sequence[int]) -> Weights:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(20, 3, sparse=True).double(), nn.Linear(3, 1).double()
    reference, other = copy.deepcopy(embedding), copy.deepcopy(head)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*embedding.parameters(), *head.parameters()], 0.5))
    plain = torch.optim.SGD([*reference.parameters(), *other.parameters()], 0.5)
    for batch in range(batches[hvd.rank()]):
        optimizer.zero_grad()
        plain.zero_grad()
        head(embedding(torch.tensor([batch, hvd.rank()]))).sum().backward()
        for rank in range(hvd.size()):
            if batch < batches[rank]:
                (other(reference(torch.tensor([batch, rank]))).sum() / hvd.size()).backward()
        optimizer.step()
        plain.step()
    hvd.join()
    for one, two in zip([*weights(embedding), *weights(head)], [*weights(reference), *weights(other)], strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-12)
    return weights(embedding)


@pytest.mark.native("Horovod gathers nothing while a rank has joined")
@pytest.mark.parametrize("batches", [[3, 1], [0, 2]])
def test_sparse_gradients_of_those_who_train(batches: list[int]) -> None:
    _on(2, _sparse, batches)


def _unfreeze(batches: Sequence[int]) -> Weights:
    """All ranks take the second layer in before rank 0 joins; the new plan is made when it has."""
    model = _model()
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    for batch in range(batches[hvd.rank()]):
        if batch == 1:
            model[2].requires_grad_(True)
        optimizer.zero_grad()
        _loss(model, 0, batch, hvd.rank()).backward()
        optimizer.step()
    model[2].requires_grad_(True)
    hvd.join()
    return weights(model)


@pytest.mark.native("Horovod gathers nothing while a rank has joined")
@pytest.mark.parametrize("over", ["shared_memory", "mpi"])
def test_a_plan_is_made_anew_with_ranks_that_have_joined(over: str) -> None:
    first, second, third = _on(3, _unfreeze, [1, 3, 3], over=over)
    for one, two in zip(second, third, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first[2], second[2])


def _mixed() -> int:
    """Named operations and an allreduce inside of the model (SyncBatchNorm) go on with zeros, too."""
    model = nn.Sequential(nn.Linear(4, 3), hvd.SyncBatchNorm(3), nn.Linear(3, 1)).double()
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    for batch in range(2 + 2 * hvd.rank()):
        optimizer.zero_grad()
        loss = _loss(model, 0, batch, hvd.rank())
        loss.backward()
        optimizer.step()
        training = sum(2 + 2 * rank > batch for rank in range(hvd.size()))
        assert hvd.allreduce(torch.ones(2), name="metric", op=hvd.Sum).tolist() == [training] * 2
    with_nothing_left = hvd.join()
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
    return with_nothing_left


def test_named_operations_between_steps() -> None:
    assert _on(3, _mixed) == [2, 2, 2]


def _asks_too_much() -> str:
    if hvd.rank() == 1:
        with pytest.raises(HorovodInternalError, match="has joined") as caught:
            hvd.broadcast_object(1)
        hvd.join()
        return str(caught.value)
    hvd.join()
    return ""


@pytest.mark.native("Horovod says it in its own words")
def test_what_needs_all_ranks_fails_while_one_has_joined() -> None:
    assert "rank 0 (host" in _on(2, _asks_too_much)[1]


def _dropped() -> int:
    """An optimizer that only rank 1 still has is none for the end of a join."""
    model, other = _model(), _model(1)
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    gone: Any = hvd.DistributedOptimizer(_sgd(other), other.named_parameters())
    for each, one in ((model, optimizer), (other, gone)):
        _loss(each, 0, 0, 0).backward()
        one.step()
    kept = [gone, other] if hvd.rank() == 1 else []
    del gone, other, each, one
    last = hvd.join()
    assert len(kept) == 2 * hvd.rank()
    return last


def test_an_optimizer_that_some_rank_has_dropped_does_not_hold_up_the_join() -> None:
    assert _on(2, _dropped)[0] in (0, 1)


def _leaves() -> str:
    hvd.init()
    if hvd.rank() == 1:
        engine._at_exit()  # the end of a script without join()
        return ""
    with pytest.raises(HorovodInternalError, match="rank 1") as caught:
        hvd.join()
    return str(caught.value)


@pytest.mark.native("Horovod waits for it")
def test_a_rank_that_ends_without_joining_is_told_to_those_who_have() -> None:
    try:
        told = run_ranks(2, _leaves, fresh=True, timeout=10)[0]
    except RanksFailedError as error:  # MPI's own end waits for nobody in particular
        told = error.results[0]
    assert "has reached the end of its script, but join() waits for it on rank 0" in told


def _goes_on_without_names() -> None:
    rank, size = hvd.rank(), hvd.size()
    for _ in range(2):
        for _ in range(3 + 4 * rank):
            hvd.allreduce(torch.ones(2))
        if rank == size - 1:
            with pytest.raises(HorovodInternalError, match="has joined"):
                hvd.add_process_set([0])
        hvd.join()
        assert hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum).tolist() == [sum(range(size))] * 2
        assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))
        assert hvd.remove_process_set(hvd.add_process_set([size - 1]))


@pytest.mark.native("Horovod's core counts on, and waits")
@pytest.mark.parametrize("size", [2, 3])
def test_operations_without_names_meet_again_when_all_have_joined(size: int) -> None:
    _on(size, _goes_on_without_names)
