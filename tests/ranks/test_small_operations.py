"""Small operations that ranks do at once: the same results, whoever is late, early, in another order or another way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numbers_of_ranks import FLOATS, OPS, buffer_of, expect, pattern, reduced
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.transport.api import Transport
from hvdkit.transport.shared.collectives import slot_bytes

pytestmark = pytest.mark.ranks


def _on(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(size, _joined, body, args, timeout=60)


def _joined(body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with joined():
        return body(*args)


def _at_their_own_pace(transport: Transport) -> None:
    """Ranks that are early or late at each collective all have its result, and no other one's."""
    dice = random.Random(transport.rank)
    for turn in range(3_000):
        count = random.Random(turn).randrange(1, 1_000)
        numbers = buffer_of(np.full(count, turn + transport.rank), "float64")
        if dice.random() < 0.002:
            time.sleep(0.002)
        if turn % 3:
            transport.allreduce(numbers)
            assert (numbers.array == transport.size * turn + sum(range(transport.size))).all()
        else:
            transport.broadcast(numbers, turn % transport.size)
            assert (numbers.array == turn + turn % transport.size).all()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_slots_are_whole_until_everyone_has_read_them(size: int) -> None:
    run_ranks(size, _at_their_own_pace, transport="shared_memory")


@pytest.mark.parametrize("size", [2, 7, 64, 500, 10_000])
def test_slots_take_little_memory_however_many_ranks(size: int) -> None:
    assert 64 <= slot_bytes(size) <= 64 * 1024
    assert 2 * size * slot_bytes(size) <= 2 * 64 * size + 2 * 512 * 1024


def _reduce_everything() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in (*FLOATS, "int32", "uint8"):
        for op in OPS:
            for count in (0, 1, 5, 1_000):
                values = pattern(rank, count, dtype, op)
                tensor = torch.from_numpy(np.asarray(values)).to(getattr(torch, dtype))
                hvd.allreduce_(tensor, op=getattr(hvd, op.capitalize()), name="again")
                expect(buffer_of(tensor.double().numpy(), "float64"), reduced(size, count, dtype, op), f"{dtype} {op}")
    numbers = torch.tensor([7, -7, 3])
    assert hvd.allreduce(numbers + rank, op=hvd.Average).tolist() == [
        int((value * size + sum(range(size))) / size) for value in (7, -7, 3)
    ]
    group = hvd.grouped_allreduce([torch.ones(3) * rank, torch.ones(()) * rank], op=hvd.Sum, postscale_factor=0.5)
    assert [one.sum().item() for one in group] == [1.5 * sum(range(size)), 0.5 * sum(range(size))]
    for root in range(size):
        assert hvd.broadcast(torch.tensor([rank, 5]), root).tolist() == [root, 5]


@pytest.mark.parametrize(
    "size", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_small_operations_give_what_large_ones_give(size: int) -> None:
    _on(size, _reduce_everything)


def _mixed(seed: int) -> None:
    """The same operations on all ranks, each done or begun as a rank likes."""
    rank, size = hvd.rank(), hvd.size()
    own, common = random.Random(100 * seed + rank), random.Random(seed)
    handles: list[tuple[int, int]] = []
    total = sum(range(size))
    for turn in range(150):
        elements = common.choice((1, 50, 3_000, 30_000))
        tensor = torch.full((elements,), float(rank + turn))
        if own.random() < 0.1:
            time.sleep(own.random() * 0.01)
        if own.random() < 0.3:
            handles.append((turn, hvd.allreduce_async(tensor, name=f"t{turn}", op=hvd.Sum)))
        else:
            assert (hvd.allreduce(tensor, name=f"t{turn}", op=hvd.Sum) == total + size * turn).all()
        if own.random() < 0.2:
            own.shuffle(handles)
            for number, handle in handles:
                assert (hvd.synchronize(handle) == total + size * number).all()
            handles.clear()
    for number, handle in handles:
        assert (hvd.synchronize(handle) == total + size * number).all()
    hvd.barrier()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_wait_and_ranks_that_do_not_meet(size: int) -> None:
    for seed in range(3):
        _on(size, _mixed, seed)


def _threads_in_any_order() -> None:
    def work(number: int) -> None:
        for turn in range(40):
            value = hvd.allreduce(torch.tensor([float(hvd.rank())]), name=f"{number}.{turn}", op=hvd.Sum)
            assert value.item() == sum(range(hvd.size()))
            good.append(turn)

    good: list[int] = []
    numbers = list(range(4))
    random.Random(hvd.rank()).shuffle(numbers)
    threads = [threading.Thread(target=work, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(good) == 160


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_threads_of_a_rank_do_small_operations_at_once(size: int) -> None:
    _on(size, _threads_in_any_order)


def _last_one_and_out(late: int) -> float:
    value = 0.0
    for turn in range(20):
        if hvd.rank() == late:
            time.sleep(0.01)
        value = hvd.allreduce(torch.tensor([float(turn)]), name="x").item()
    return value


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_ends_after_its_last_operation_does_not_spoil_it(late: int) -> None:
    assert _on(2, _last_one_and_out, late) == [19.0] * 2
