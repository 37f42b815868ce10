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
from hvdkit.engine import runtime as engine
from hvdkit.engine.named import fast_lane
from hvdkit.engine.named.announcement import Announcement
from hvdkit.engine.named.shortcut import key_of, plan_shortcut
from hvdkit.transport.api import Transport
from hvdkit.transport.shared.lane import DIFFERENT, EQUAL, Lane, lane_bytes, lane_limit

pytestmark = pytest.mark.ranks


def _on(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(size, _joined, body, args, timeout=60)


def _joined(body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with joined():
        return body(*args)


def _pass_by(transport: Transport) -> None:
    """Ranks at their own pace see every message of every position whole, until they leave it."""
    lane, dice = transport.open_lane(), random.Random(transport.rank)
    assert lane is not None
    for turn in range(3_000):
        count = random.Random(turn).randrange(1, lane.limit // 8)
        while not lane.show(turn // 3, [buffer_of(np.full(count, turn + transport.rank), "float64")]):
            time.sleep(0)
        if dice.random() < 0.002:
            time.sleep(0.002)
        while (seen := lane.look()) != EQUAL:
            assert seen != DIFFERENT
            time.sleep(0)
        for rank, shown in enumerate(lane.read(0, count, "float64")):
            assert (shown.array == turn + rank).all()
        lane.leave()
    lane.close()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_messages_stay_whole_until_everyone_has_read_them(size: int) -> None:
    run_ranks(size, _pass_by, transport="shared_memory" if size > 1 else "single")


def _differ(transport: Transport) -> list[int]:
    lane, seen = transport.open_lane(), []
    assert lane is not None
    for key in (transport.rank // 2, 7):
        assert lane.show(key, ())
        transport.barrier()
        seen.append(lane.look())
        transport.barrier()
        lane.leave()
    lane.close()
    return seen


def test_another_key_is_seen_by_all_and_the_next_position_is_free_of_it() -> None:
    assert run_ranks(3, _differ, transport="shared_memory") == [[DIFFERENT, EQUAL]] * 3


@pytest.mark.parametrize("size", [1, 2, 7, 64, 500, 10_000])
def test_a_lane_takes_little_memory_however_many_ranks(size: int) -> None:
    assert 64 <= lane_limit(size) <= 64 * 1024
    assert lane_bytes(size) <= size * 1024 + 4 * 512 * 1024


def test_what_ranks_may_not_differ_in_makes_another_key() -> None:
    def key(name: str, **more: Any) -> int:
        said = {"kind": "allreduce", "tensors": (("float32", (3,)),), "options": (("op", "sum"),), **more}
        made = plan_shortcut(Announcement(**said), 1024, 2)
        assert made is not None
        return key_of(name, made)

    others = [
        key("b"),
        key("a", tensors=(("float32", (3, 1)),)),
        key("a", tensors=(("float64", (3,)),)),
        key("a", tensors=(("float32", (3,)),) * 2),
        key("a", options=(("op", "max"),)),
        key("a", options=(("op", "sum"), ("postscale factor", "2.0"))),
        key("a", kind="broadcast", options=(("root rank", "0"),)),
        key("a", kind="broadcast", options=(("root rank", "1"),)),
    ]
    assert key("a") == key("a")
    assert len({key("a"), *others}) == 1 + len(others)


@pytest.mark.parametrize(
    "asked",
    [
        Announcement("allreduce", (("float32", (300,)),), (("op", "sum"),)),  # too large
        Announcement("allreduce", (("float32", (3,)),), (("op", "adasum"),)),
        Announcement("allreduce", (("int32", (3,)),), (("op", "sum"), ("prescale factor", "0.5"))),
        Announcement("allreduce", (("float32", (3,)),), (("op", "max"), ("postscale factor", "2.0"))),
        Announcement("allgather", (("float32", (3,)),)),
        Announcement("alltoall", (("float32", (3,)),)),
    ],
    ids=str,
)
def test_what_is_not_for_a_lane(asked: Announcement) -> None:
    assert plan_shortcut(asked, 1024, 2) is None


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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_small_operations_give_what_large_ones_give(size: int) -> None:
    _on(size, _reduce_everything)


def _mixed(seed: int, patience: float) -> int:
    """The same operations on all ranks, each done or begun as a rank likes; how many were announced."""
    fast_lane._PATIENCE_S = patience
    made = engine.runtime("the test")
    known: Any = hvd.global_process_set.group("the test").engine
    announced = 0
    usual = known.announce

    def count(*args: Any) -> None:
        nonlocal announced
        announced += 1
        usual(*args)

    known.announce = count
    own, common = random.Random(100 * seed + made.world.rank), random.Random(seed)
    handles: list[tuple[int, int]] = []
    total = sum(range(hvd.size()))
    for turn in range(150):
        elements = common.choice((1, 50, 3_000, 30_000))
        tensor = torch.full((elements,), float(hvd.rank() + turn))
        if own.random() < 0.1:
            time.sleep(own.random() * 0.01)
        if own.random() < 0.3:
            handles.append((turn, hvd.allreduce_async(tensor, name=f"t{turn}", op=hvd.Sum)))
        else:
            assert (hvd.allreduce(tensor, name=f"t{turn}", op=hvd.Sum) == total + hvd.size() * turn).all()
        if own.random() < 0.2:
            own.shuffle(handles)
            for number, handle in handles:
                assert (hvd.synchronize(handle) == total + hvd.size() * number).all()
            handles.clear()
    for number, handle in handles:
        assert (hvd.synchronize(handle) == total + hvd.size() * number).all()
    hvd.barrier()
    return announced


@pytest.mark.parametrize("patience", [0.002, 0.0])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_that_wait_and_ranks_that_do_not_meet(size: int, patience: float) -> None:
    for seed in range(3):
        _on(size, _mixed, seed, patience)


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


@pytest.mark.parametrize("size", [2, 3])
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


def test_without_memory_in_common_there_is_no_lane() -> None:
    run_ranks(2, _no_lane, transport="mpi")


def _no_lane(transport: Transport) -> None:
    assert transport.open_lane() is None


def test_a_rank_too_far_ahead_of_a_reader_takes_the_other_way() -> None:
    lane, shown = Lane(0, 2), []
    for _ in range(6):  # rank 1 reads nothing
        shown.append(lane.show(1, ()))
        lane.leave()
    assert shown == [True] * 4 + [False] * 2
