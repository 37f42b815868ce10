"""Process sets cost nothing until they are used, and are made for a whole axis of a mesh in one call."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipe_ranks import PipeTransport, run_piped
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.config import Config
from hvdkit.engine import runtime as engine
from hvdkit.engine.basics import split_world
from hvdkit.engine.named.engine import NamedEngine
from hvdkit.engine.named.submit import collective_step
from hvdkit.engine.observe.timeline import Timeline
from hvdkit.engine.process_sets import ProcessSets
from hvdkit.errors import HorovodInternalError
from hvdkit.transport import mailbox
from hvdkit.transport.api import Transport
from hvdkit.transport.gloo.rendezvous import TransportRendezvousStore
from hvdkit.transport.gloo.transport import open_gloo
from hvdkit.transport.shared.transport import SharedMemoryTransport
from hvdkit.transport.single import SingleTransport

pytestmark = [pytest.mark.ranks, pytest.mark.native("Horovod makes its process sets itself, and at once")]

TRANSPORTS = [
    "shared_memory",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpi", "gloo", "hierarchical_pairs")),
]


def taken() -> tuple[int, int, int]:
    """Descriptors, threads, and mappings of files: of memory itself there are more or less, whatever was made."""
    with open("/proc/self/maps") as file:
        mappings = sum("/" in line for line in file)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings


def _assert_nothing_taken(before: tuple[int, int, int], after: tuple[int, int, int]) -> None:
    """Less is fine: a thread that has been joined is there for a moment longer."""
    assert all(now <= then for then, now in zip(before, after, strict=True)), f"{before} before, {after} after"


def _sum(process_set: hvd.ProcessSet, name: str) -> list[float]:
    return hvd.allreduce(torch.full((3,), float(hvd.rank())), name=name, op=hvd.Sum, process_set=process_set).tolist()


def _many_sets(transport: str) -> tuple[tuple[int, int, int], tuple[int, int, int], list[bool]]:
    with joined(transport):
        rank = hvd.rank()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3, 3]
        before = taken()
        for _ in range(3):
            sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
            after = taken()
            _assert_nothing_taken(before, after)
            for one in sets:
                assert hvd.remove_process_set(one)  # that nobody has used
        orders = [list(order) for count in (2, 3) for order in itertools.permutations(range(3), count)]
        keys = [order.index(rank) if rank in order else None for order in orders]
        split = [split_world(None if key is None else 0, key or 0) for key in keys] + [split_world(rank)]
        assert len(hvd.get_process_set_ids_and_ranks()) == 1 + 6 + 5 + 3  # that of all ranks is there
        after = taken()
        right = [_sum(one, "first") == [float(sum(one.ranks or []))] * 3 for one in split if one is not None]
    return before, after, right


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fourteen_sets_that_are_not_used_take_no_descriptor_thread_nor_mapping(transport: str) -> None:
    for before, after, right in run_ranks(3, _many_sets, transport):
        _assert_nothing_taken(before, after)
        assert len(right) == 4 + 6 + 1 and all(right)


def _mesh(transport: str) -> Any:
    with joined(transport):
        rank = hvd.rank()
        world: Any = engine.runtime("the test").sets._world
        calls: list[int] = []
        split = world.split

        def counted(groups: Any) -> Any:
            calls.append(len(groups))
            return split(groups)

        world.split = counted
        inner, outer = split_world(rank // 2), split_world(rank % 2, key=-rank)
        half = split_world(None if rank < 2 else 0)
        assert inner is not None and outer is not None
        found: list[Any] = [inner.ranks, outer.ranks, outer.rank(), None if half is None else half.ranks]
        found += [_sum(inner, "row")[0], _sum(outer, "column")[0], len(hvd.get_process_set_ids_and_ranks())]
        assert split_world(rank // 2) is inner
        numbers = hvd.allgather(torch.tensor([rank]), process_set=outer).tolist()
        assert hvd.remove_process_set(outer)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 4
        return found, numbers, calls


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_call_makes_all_groups_of_an_axis(transport: str) -> None:
    for rank, (found, numbers, calls) in enumerate(run_ranks(4, _mesh, transport)):
        row, column = [rank // 2 * 2, rank // 2 * 2 + 1], sorted([rank, (rank + 2) % 4], reverse=True)
        half = None if rank < 2 else [2, 3]
        # Besides the world there are four sets; [2, 3] was one of them.
        assert found == [row, column, column.index(rank), half, sum(row), sum(column), 5]
        assert numbers == column
        assert calls == [2, 2, 2, 2]  # for each axis one call for plans and one for operations, of two groups each


def _first_use_in_any_order(transport: str) -> list[float]:
    """Each rank begins with another set, from several threads or from one, and before or after the world."""
    with joined(transport):
        rank = hvd.rank()
        low, high, ends = (hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2]))
        if rank == 0:
            handle = hvd.allreduce_async(torch.ones(2), name="early", op=hvd.Sum, process_set=low)
            world = hvd.allreduce(torch.ones(1), name="world", op=hvd.Sum)  # rank 1 comes to this first
            results = [hvd.synchronize(handle)[0].item(), world.item()]
            threads = [threading.Thread(target=_sum, args=(one, "second")) for one in (low, ends)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return results
        world = hvd.allreduce(torch.ones(1), name="world", op=hvd.Sum)
        results = [2.0, world.item()]
        if rank == 1:
            results[0] = hvd.allreduce(torch.ones(2), name="early", op=hvd.Sum, process_set=low)[0].item()
            for one in (high, low):
                _sum(one, "second")
        else:
            for one in (ends, high):
                _sum(one, "second")
        return results


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sets_are_used_for_the_first_time_in_any_order_and_thread(transport: str) -> None:
    assert run_ranks(3, _first_use_in_any_order, transport) == [[2.0, 3.0]] * 3


def _first_use_where_calls_take_turns(transport: str) -> Any:
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    return _first_use_in_any_order(transport)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "mpi", "hierarchical_pairs"])
def test_first_uses_take_turns_where_mpi_wants_that(transport: str) -> None:
    assert run_ranks(3, _first_use_where_calls_take_turns, transport, fresh=True, timeout=60) == [[2.0, 3.0]] * 3


def _used_by_one_rank_only(transport: str) -> int:
    """Rank 0 begins an operation that rank 1 never comes to, and all remove the set, or leave it to shutdown()."""
    with joined(transport):
        for last in (False, True):
            pair = hvd.add_process_set([0, 1])
            handle = hvd.allreduce_async(torch.ones(2), name="alone", process_set=pair) if hvd.rank() == 0 else None
            hvd.barrier()
            if not last:
                assert hvd.remove_process_set(pair)
            if handle is not None and not last:
                with pytest.raises(HorovodInternalError):
                    hvd.synchronize(handle)
        return int(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_a_set_that_some_have_used_is_removed(transport: str) -> None:
    assert run_ranks(3, _used_by_one_rank_only, transport, fresh=True) == [3] * 3


def _joins_before_a_set_is_used(transport: str) -> float:
    """Rank 1 has joined when rank 0 uses the set of both for the first time."""
    with joined(transport):
        pair = hvd.add_process_set([0, 1])
        value = 1.0
        if hvd.rank() == 0:
            time.sleep(0.5)
            value = hvd.allreduce(torch.ones(1), name="late", op=hvd.Sum, process_set=pair).item()
        hvd.join()
        return value


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_has_joined_takes_part_in_the_first_use(transport: str) -> None:
    assert run_ranks(3, _joins_before_a_set_is_used, transport) == [1.0] * 3


def _use_without_rank_one(pipes: PipeTransport, shared: bool) -> str:
    """Rank 1 dies after a set was made of ranks 0 and 1, and before anybody has used it."""
    base = open_gloo(TransportRendezvousStore(pipes), pipes.rank, pipes.size, host="here")
    world: Transport = SharedMemoryTransport(base, base, host="here") if shared else base

    def open_engine(transport: Transport, ranks: Sequence[int]) -> NamedEngine:
        return NamedEngine(transport, Config(), hosts=["here"] * len(ranks), ranks=ranks, timeline=Timeline())

    groups = ProcessSets(world, open_engine)
    groups.open_world()
    pair = hvd.ProcessSet([0, 1])
    groups.add(pair)
    world.barrier()
    if pipes.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if pipes.rank == 2:
        return ""
    with pytest.raises(HorovodInternalError) as caught:
        collective_step(pair.group("the test").engine, "a step", None)
    return str(caught.value)


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["gloo", "shared_memory"])
def test_a_rank_that_dies_before_the_first_use_is_named(shared: bool) -> None:
    assert "Rank 1 on host here has died" in run_piped(3, _use_without_rank_one, shared)[0]


def test_a_list_of_ranks_is_no_process_set() -> None:
    ranks: Any = [0]
    for call in (hvd.remove_process_set, lambda each: hvd.broadcast_object(1, process_set=each)):
        with pytest.raises(TypeError, match=r"process_set is \[0\], but it must be an hvd.ProcessSet"):
            call(ranks)


class _StuckThread(threading.Thread):
    """A thread that never ends; a wait for it passes on a clock that stands otherwise."""

    now_s = 0.0

    def join(self, timeout: float | None = None) -> None:
        assert timeout is not None, "a wait without an end"
        _StuckThread.now_s += timeout
        if self in mailbox._openings:
            mailbox._openings.remove(self)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[_StuckThread]:
    _StuckThread.now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: _StuckThread.now_s)
    return _StuckThread


def test_the_end_of_a_process_waits_once_for_all_groups_that_are_being_opened(
    monkeypatch: pytest.MonkeyPatch, clock: type[_StuckThread]
) -> None:
    monkeypatch.setattr(mailbox, "_openings", [_StuckThread() for _ in range(3)])
    mailbox._end_openings()
    assert not mailbox._openings and clock.now_s == 2.0


def test_a_rank_that_leaves_tells_all_groups_and_then_waits_once_for_their_threads(clock: type[_StuckThread]) -> None:
    told_s = []
    groups = ProcessSets(SingleTransport(), NamedEngine)  # type: ignore[arg-type]
    for number in range(3):
        group: Any = SimpleNamespace(
            leave=lambda why: told_s.append(clock.now_s), _engine=SimpleNamespace(thread=_StuckThread())
        )
        groups._sets[number] = SimpleNamespace(_known=lambda group=group: group)  # type: ignore[assignment]
    groups.leave("has left")
    assert told_s == [0.0] * 3 and clock.now_s == 2.0
