"""Named operations: in any order, from any thread, alike or told why not."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RanksFailedError, run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.errors import HorovodInternalError


def _on(size: int, body: Callable[..., Any], *args: Any, over: str = "auto", **settings: Any) -> list[Any]:
    return run_ranks(size, _joined, body, args, {"transport": over, **settings}, timeout=60)


def _joined(body: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    with joined(**settings):
        return body(*args)


def _any_order() -> None:
    dice, size = random.Random(hvd.rank()), hvd.size()
    for round_ in range(4):
        names = list(range(40))
        dice.shuffle(names)
        handles = {}
        for name in names:
            value = torch.full((name * 7 % 50, 2), float(name + hvd.rank()))
            handles[name] = hvd.allreduce_async_(value, name=f"n{name}", op=hvd.Sum)
        dice.shuffle(names)
        for name in names:
            made = hvd.synchronize(handles[name])
            assert (made == name * size + sum(range(size))).all(), (round_, name)


@pytest.mark.parametrize("over", ["auto", "mpi", "hierarchical_pairs"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_operations_submitted_in_any_order(size: int, over: str) -> None:
    _on(size, _any_order, over=over)


def _from_threads() -> None:
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for turn in range(10):
                made = hvd.allreduce(torch.ones(100) * thread, name=f"thread{thread}.{turn}", op=hvd.Sum)
                assert (made == thread * hvd.size()).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failures, failures


def test_operations_from_several_threads() -> None:
    _on(2, _from_threads)


def _dropped_handle() -> None:
    hvd.allreduce_async(torch.ones(3), name="dropped")
    time.sleep(0.2 * hvd.rank())
    hvd.barrier()
    assert hvd.allreduce(torch.ones(3), name="dropped", op=hvd.Sum).tolist() == [hvd.size()] * 3


def test_an_operation_that_nobody_waits_for_is_done_all_the_same() -> None:
    _on(2, _dropped_handle)


def _busy_rank(finished: Path) -> bool:
    """Rank 1 computes until rank 0 has its result, which rank 1's main thread therefore cannot have helped to make."""
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(3), name="x")
        finished.touch()
        return True
    handle = hvd.allreduce_async(torch.ones(3), name="x")
    deadline = time.monotonic() + 30
    while not finished.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    seen = finished.exists()
    hvd.synchronize(handle)
    return seen


def test_a_rank_that_computes_does_not_hold_up_what_it_has_submitted(tmp_path: Path) -> None:
    assert _on(2, _busy_rank, tmp_path / "finished") == [True, True]


def _disagree(case: str) -> str:
    first = hvd.rank() == 0
    ones = torch.ones(4)
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: hvd.allreduce(ones if first else torch.ones(5), name="t"),
        "dtype": lambda: hvd.allreduce(ones if first else ones.double(), name="t"),
        "op": lambda: hvd.allreduce(ones, name="t", op=hvd.Sum if first else hvd.Average),
        "root rank": lambda: hvd.broadcast(ones, 0 if first else 1, name="t"),
        "postscale factor": lambda: hvd.allreduce(ones, name="t", postscale_factor=1.0 if first else 2.0),
        "number of tensors": lambda: hvd.grouped_allreduce([ones] * (1 if first else 2), name="t"),
        "shape after the first dimension": lambda: hvd.alltoall(torch.ones(2, 2 if first else 3), name="t"),
    }
    with pytest.raises(HorovodInternalError) as caught:
        calls[case]()
    assert hvd.allreduce(ones, name="t", op=hvd.Sum).tolist() == [hvd.size()] * 4  # goes on
    return str(caught.value)


CASES = [
    "shape",
    "dtype",
    "op",
    "root rank",
    "postscale factor",
    "number of tensors",
    "shape after the first dimension",
]


@pytest.mark.native("Horovod names neither ranks nor hosts")
@pytest.mark.parametrize("case", CASES)
def test_what_the_ranks_disagree_about_is_an_error_on_all(case: str) -> None:
    for message in _on(2, _disagree, case):
        assert f"disagree about the {case}: rank 0 (host" in message
        assert "rank 1 (host" in message


def _twice() -> str:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="same")
        with pytest.raises(ValueError, match="still running") as caught:
            hvd.allreduce_async(torch.ones(2), name="same")
        assert isinstance(caught.value, HorovodInternalError)
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), name="same")
    hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None  # given once
    return "fine"


def test_a_name_is_used_once_at_a_time() -> None:
    assert _on(2, _twice) == ["fine"] * 2


def _alltoall() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        rows = torch.cat([torch.full((to + 1, 2), 10 * rank + to) for to in range(size)]).to(dtype)
        made, counts = hvd.alltoall(rows, splits=[to + 1 for to in range(size)])
        assert counts.tolist() == [rank + 1] * size
        expected = torch.cat([torch.full((rank + 1, 2), 10 * source + rank) for source in range(size)]).to(dtype)
        assert torch.equal(made, expected)
    some, counts = hvd.alltoall(torch.arange(size + 3) + 10 * rank, splits=[1] * size)
    assert counts.tolist() == [1] * size and some.tolist() == [10 * source + rank for source in range(size)]
    equal = hvd.alltoall(torch.arange(2 * size))
    assert equal.tolist() == [2 * rank, 2 * rank + 1] * size
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(2), splits=[3] * size)
    leaf = torch.ones(size, requires_grad=True)
    (hvd.alltoall(leaf) * torch.arange(1.0, size + 1)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [rank + 1.0] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_alltoall_sends_each_rank_its_rows(size: int) -> None:
    _on(size, _alltoall)


def _reducescatter() -> None:
    rank, size = hvd.rank(), hvd.size()
    whole = torch.arange(2.0 * (size + 1)).view(size + 1, 2) * (rank + 1)
    total = torch.arange(2.0 * (size + 1)).view(size + 1, 2) * sum(range(1, size + 1))
    edges = [0, 2, *range(3, size + 2)]
    mine = total[edges[rank] : edges[rank + 1]]
    assert torch.equal(hvd.reducescatter(whole, op=hvd.Sum), mine)
    torch.testing.assert_close(hvd.reducescatter(whole), mine / size)
    before = whole.clone()
    assert torch.equal(hvd.reducescatter(whole, op=hvd.Sum, prescale_factor=0.5), mine / 2)
    assert torch.equal(whole, before), "the caller's tensor was changed"
    several = hvd.grouped_reducescatter([whole, whole.int()], op=hvd.Sum)
    assert torch.equal(several[0], mine) and torch.equal(several[1], mine.int())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reducescatter_gives_each_rank_its_rows(size: int) -> None:
    _on(size, _reducescatter)


def _groups() -> None:
    size = hvd.size()
    tensors = [torch.ones(3), torch.ones(2, 2).double(), torch.arange(4)]
    made = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert [torch.equal(one, size * given) for one, given in zip(made, tensors, strict=True)] == [True] * 3
    assert hvd.grouped_allreduce_(tensors, op=hvd.Sum)[1] is tensors[1]
    gathered = hvd.grouped_allgather([torch.ones(hvd.rank(), 2), torch.tensor(hvd.rank())])
    assert gathered[0].shape == (sum(range(size)), 2)
    assert gathered[1].tolist() == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_groups_are_done_as_one(size: int) -> None:
    _on(size, _groups)


def _join() -> list[Any]:
    rank, size = hvd.rank(), hvd.size()
    seen: list[Any] = []
    for epoch in range(2):
        for batch in range(2 + 2 * rank):
            made = hvd.allreduce(torch.ones(3), name=f"batch{batch}", op=hvd.Sum)
            seen.append((epoch, batch, made[0].item()))
        seen.append(hvd.join())
    assert all(
        value == sum(2 + 2 * other > batch for other in range(size))
        for _, batch, value in (one for one in seen if isinstance(one, tuple))
    ), seen
    return [one for one in seen if not isinstance(one, tuple)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_have_joined_take_part_with_zeros(size: int) -> None:
    assert _on(size, _join) == [[size - 1, size - 1]] * size


def _sets() -> None:
    rank = hvd.rank()
    low, high = hvd.add_process_set([0, 1]), hvd.add_process_set(hvd.ProcessSet([1, 2]))
    assert (low.process_set_id, high.process_set_id) == (1, 2)
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 1], 2: [1, 2]}
    with pytest.raises(ValueError, match="added already"):
        hvd.add_process_set([1, 0])
    for turn in range(5):
        handles = []
        for one in (low, high) if turn % 2 else (high, low):
            if one.included():
                handles.append((one, hvd.allreduce_async(torch.tensor(float(rank)), op=hvd.Sum, process_set=one)))
            else:
                with pytest.raises(ValueError, match="not in ProcessSet"):
                    hvd.allreduce(torch.ones(1), process_set=one)
        for one, handle in reversed(handles):
            assert hvd.synchronize(handle) == sum(one.ranks or [])
    if high.included():
        assert high.size() == 2 and high.rank() == rank - 1
        assert hvd.broadcast(torch.tensor(rank), 2, process_set=high) == 2
        assert hvd.allgather(torch.tensor(rank), process_set=high).tolist() == [1, 2]
    assert str(high) == "ProcessSet(process_set_id=2, ranks=[1, 2], mpi_comm=None)"
    assert hvd.remove_process_set(high)
    assert hvd.remove_process_set(low)
    assert not hvd.remove_process_set(low)
    with pytest.raises(ValueError, match="has not been added"):
        hvd.allreduce(torch.ones(1), process_set=low)
    # Numbers are used again, as in Horovod: first that of the set removed first.
    assert [hvd.add_process_set(ranks).process_set_id for ranks in ([0, 2], low, [2])] == [2, 1, 3]
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 2: [0, 2], 1: [0, 1], 3: [2]}
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 3


@pytest.mark.parametrize("over", ["auto", "mpi"])
def test_process_sets_work_side_by_side(over: str) -> None:
    _on(3, _sets, over=over)


def _refused_sets() -> None:
    for sets, words in (([[0], [0]], "added already"), ([[0, 1]], "added already"), ([[5]], "ranks from 0 to 1")):
        with pytest.raises(ValueError, match=words):
            hvd.init(process_sets=sets)
        assert hvd.is_initialized() and hvd.size() == 2
        assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1]}
        hvd.shutdown()
    with pytest.raises(ValueError, match="added already"):
        hvd.init(process_sets=[[0], [0]])
    first = hvd.ProcessSet([0])
    hvd.init(process_sets=[first, [1]])
    hvd.init(process_sets=[first, [1]])  # nothing is added twice
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1], 1: [0], 2: [1]}
    if first.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first).item() == 1.0
    hvd.shutdown()


@pytest.mark.native("Horovod's core is told of the sets in the same way")
def test_init_refuses_process_sets_that_are_given_twice() -> None:
    run_ranks(2, _refused_sets)


def _stall(shutdown: float) -> str:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvdkit").addHandler(handler)
    if hvd.rank() == 1:
        _looks_at_the_sky()
        if not shutdown:
            hvd.allreduce(torch.ones(1), name="late")
        return ""
    if shutdown:
        with pytest.raises(HorovodInternalError, match="aborted after") as caught:
            hvd.allreduce(torch.ones(1), name="late")
        return str(caught.value)
    hvd.allreduce(torch.ones(1), name="late")
    return "".join(said)


def _looks_at_the_sky() -> None:
    time.sleep(2.5)


@pytest.mark.native("Horovod reports what stalls itself, in its own words")
@pytest.mark.parametrize("shutdown", [0.0, 1.5])
def test_a_stall_names_the_operation_the_missing_rank_and_what_it_does(shutdown: float) -> None:
    told = _on(2, _stall, shutdown, stall_check_s=1.0, stall_shutdown_s=shutdown)[0]
    assert "allreduce.late has been waiting" in told
    assert "not by rank 1 (host" in told
    if not shutdown:
        assert "_looks_at_the_sky" in told


def _left_early() -> None:
    hvd.init()
    if hvd.rank() == 1:
        hvd.shutdown()  # hangs, as it is not everyone's
        return
    with pytest.raises(HorovodInternalError, match="rank 1"):
        for _ in range(1000):
            hvd.allreduce(torch.ones(1), name="x")
    raise AssertionError("rank 0 was told")  # the end of the test; rank 1 is ended soon after


@pytest.mark.native("Horovod says it in its own words")
def test_a_rank_that_left_is_an_error_for_those_who_wait() -> None:
    with pytest.raises(RanksFailedError, match="rank 0 was told"):
        run_ranks(2, _left_early, fresh=True)


def _traced(path: str) -> None:
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(3), name="seen")
    hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(3), torch.ones(4)], name="fused"))
    hvd.allgather(torch.ones(3), name="seen")
    hvd.stop_timeline()


@pytest.mark.native("Horovod writes its own timeline")
def test_the_timeline_is_a_trace_of_every_operation(tmp_path: Path) -> None:
    _on(2, _traced, str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())
    named = {event["args"]["name"]: event["pid"] for event in events if event.get("name") == "process_name"}
    assert {"allreduce.seen", "allreduce.fused", "allgather.seen"} <= set(named)
    names = [event.get("name") for event in events if event.get("pid") == named["allreduce.fused"]]
    assert {"NEGOTIATE_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"} <= set(names)
    for pid in named.values():
        phases = [event["ph"] for event in events if event.get("pid") == pid and event["ph"] in "BE"]
        assert phases.count("B") == phases.count("E") > 0


def _traced_training(path: str) -> None:
    weights = [torch.nn.Parameter(torch.ones(size)) for size in (3, 50, 7)]
    named = [(f"layer{at}", weight) for at, weight in enumerate(weights)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, 0.1), named)
    for step in range(4):
        if step == 1:
            hvd.start_timeline(path)
        if hvd.rank() == 1:
            time.sleep(0.05)
        optimizer.zero_grad()
        torch.cat(tuple(weights)).square().sum().backward()
        optimizer.step()
    hvd.stop_timeline()


@pytest.mark.native("Horovod writes its own timeline")
def test_the_timeline_shows_gradients_tensor_by_tensor(tmp_path: Path) -> None:
    _on(2, _traced_training, str(tmp_path / "trace.json"), fusion_bytes=160)
    events = json.loads((tmp_path / "trace.json").read_text())
    named = {event["args"]["name"]: event["pid"] for event in events if event.get("name") == "process_name"}
    assert {"gradients.layer0", "gradients.layer2"} <= set(named)
    assert any(name.startswith("gradients.layer1[") for name in named), "a part of a tensor says which"
    for name, pid in named.items():
        if name.startswith("gradients."):
            own = [event for event in events if event.get("pid") == pid and event["ph"] in "BE"]
            assert [event["ph"] for event in own] == ["B", "E"] * (len(own) // 2), "one activity after the other"
            seen = [event["name"] for event in own if event["ph"] == "B"]
            assert seen.count("MEMCPY_IN_FUSION_BUFFER") == seen.count("ALLREDUCE") == 3
            assert seen.count("MEMCPY_OUT_FUSION_BUFFER") == 3
    waits = [event for event in events if event.get("name") == "WAIT_FOR_OTHER_RANKS"]
    assert waits, "rank 0 waited for rank 1"


def _adasum() -> list[float]:
    same = hvd.allreduce(torch.tensor([3.0, 4.0]), op=hvd.Adasum)
    torch.testing.assert_close(same, torch.tensor([3.0, 4.0]))  # of equal vectors: their mean
    crossed = torch.zeros(hvd.size())
    crossed[hvd.rank()] = 1.0
    return hvd.allreduce(crossed, op=hvd.Adasum).tolist()  # of orthogonal ones: their sum


@pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=pytest.mark.native("Horovod's Adasum is for powers of two")), 4]
)
def test_adasum_is_a_mean_of_equals_and_a_sum_of_opposites(size: int) -> None:
    np.testing.assert_allclose(_on(size, _adasum)[0], [1.0] * size, atol=1e-6)


def _sparse() -> torch.Tensor:
    rows = torch.tensor([[0, hvd.rank() + 1]])
    mine = torch.sparse_coo_tensor(rows, torch.ones(2, 3), (5, 3), check_invariants=True)
    made: torch.Tensor = hvd.sparse_allreduce_async(mine, "s", hvd.Average)().to_dense()
    return made[:, 0]


def test_sparse_tensors_are_added_up() -> None:
    assert _on(2, _sparse)[0].tolist() == [1.0, 0.5, 0.5, 0.0, 0.0]


def _many_without_names() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(size))
    if rank:  # the others begin more than there are names for, before this one comes to any of them
        assert hvd.allreduce(torch.ones(2), name="between", op=hvd.Sum).tolist() == [size, size]
    for again in range(2):
        handles = [hvd.allreduce_async(torch.full((1 + turn % 7,), turn + rank), op=hvd.Sum) for turn in range(700)]
        if not rank and not again:
            assert hvd.allreduce(torch.ones(2), name="between", op=hvd.Sum).tolist() == [size, size]
        for turn in reversed(range(700)):
            assert hvd.synchronize(handles[turn]).tolist() == [size * turn + total] * (1 + turn % 7)
    handles = [hvd.allreduce_async(torch.ones(1 + (rank and turn == 300))) for turn in range(600)]
    with pytest.raises(HorovodInternalError, match="disagree about the shape"):
        hvd.synchronize(handles[300])
    assert all(hvd.synchronize(handle).item() == 1 for handle in handles[:300] + handles[301:])


@pytest.mark.native("Horovod's core gives every operation a name of its own")
@pytest.mark.parametrize("size", [2, 3])
def test_operations_without_names_meet_in_their_order_however_many_are_under_way(size: int) -> None:
    _on(size, _many_without_names)


def _join_behind_many() -> None:
    rank = hvd.rank()
    if rank == 0:  # the others begin more than there are names for, and join, before this one comes to any of them
        hvd.allreduce(torch.ones(1), name="between")
        time.sleep(0.3)
    handles = [hvd.allgather_async(torch.tensor([turn + rank])) for turn in range(300)]
    if rank:
        handle = hvd.allreduce_async(torch.ones(1), name="between")
        hvd.join()
        hvd.synchronize(handle)
    for turn, handle in enumerate(handles):
        assert hvd.synchronize(handle).tolist() == [turn + other for other in range(hvd.size())]
    if not rank:
        hvd.join()


@pytest.mark.native("Horovod's core gives every operation a name of its own")
@pytest.mark.parametrize("size", [2, 3])
def test_join_comes_after_the_operations_without_names_that_were_begun_before(size: int) -> None:
    _on(size, _join_behind_many)


def _given_up() -> list[float | None]:
    def difference(turn: int) -> float | None:
        try:
            return float(hvd.synchronize(handles[turn])) - 2 * turn
        except HorovodInternalError:
            return None

    if hvd.rank():  # the other one begins more than there are names for, and some of them are given up
        time.sleep(2.5)
    handles = [hvd.allreduce_async(torch.tensor([turn]), op=hvd.Sum) for turn in range(300)]
    return [difference(turn) for turn in range(300)]


@pytest.mark.native("Horovod's core gives every operation a name of its own")
def test_an_operation_without_a_name_that_comes_after_it_was_given_up_meets_no_later_one() -> None:
    first, second = _on(2, _given_up, stall_shutdown_s=1.0)
    assert first == second and None in first and {*first} <= {None, 0}
