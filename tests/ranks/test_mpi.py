"""What is MPI's own: its errors, its limits, its thread levels, and where its ranks are."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbers_of_ranks import buffer_of, expect, pattern, reduced
from openers import OPENERS
from ranks import run_ranks

from hvdkit.errors import RankLostError, TransportError
from hvdkit.transport.between.schedules import split_evenly
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.mpi import library as mpi_library
from hvdkit.transport.mpi import mailbox as mpi_mailbox
from hvdkit.transport.mpi.released import free_released
from hvdkit.transport.mpi.transport import MpiTransport


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_an_even_split_is_whole_and_even(count: int, parts: int) -> None:
    sizes = split_evenly(count, parts)
    assert sum(sizes) == count and len(sizes) == parts and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("level, name", [(0, "MPI_THREAD_SINGLE"), (1, "MPI_THREAD_FUNNELED")])
def test_too_low_a_thread_level_is_refused(level: int, name: str) -> None:
    library = _library(level)
    with pytest.raises(TransportError, match=f"{name}.*MPI_THREAD_MULTIPLE"):
        mpi_library._check_threads(library)


@pytest.mark.parametrize("level", [2, 3])
def test_serialized_and_multiple_are_enough(level: int) -> None:
    mpi_library._check_threads(_library(level))


def _library(level: int) -> SimpleNamespace:
    levels = {"THREAD_SINGLE": 0, "THREAD_FUNNELED": 1, "THREAD_SERIALIZED": 2, "THREAD_MULTIPLE": 3}
    return SimpleNamespace(Query_thread=lambda: level, **levels)


def raise_mpi_errors() -> None:
    mpi = mpi_library.load_mpi()

    def fail(kind: int) -> None:
        raise mpi.Exception(kind)

    with pytest.raises(TransportError, match=r"MPI_Allreduce failed: .*runcate") as caught:
        mpi_library.call_mpi("MPI_Allreduce", fail, mpi.ERR_TRUNCATE)
    assert not isinstance(caught.value, RankLostError)
    with pytest.raises(RankLostError, match="A rank has ended"):
        mpi_library.call_mpi("MPI_Allreduce", fail, mpi.ERR_PROC_FAILED)
    with pytest.raises(ZeroDivisionError):
        mpi_library.call_mpi("MPI_Allreduce", lambda: 1 / 0)


@pytest.mark.ranks
def test_mpi_errors_come_in_our_words() -> None:
    run_ranks(1, raise_mpi_errors)


def check_other_collectives(transport: MpiTransport) -> None:
    """More elements than MPI counts: on all ranks, or on one only; one rank's piece, or the pieces together."""
    rank, size = transport.rank, transport.size
    for counts in ([2_500, 0, 3], [400, 401, 402]):
        total, start = sum(counts), sum(counts[:rank])
        for dtype in ("float32", "float16", "complex128"):
            gathered = transport.allgather(buffer_of(pattern(rank, counts[rank], dtype), dtype), counts)
            expect(gathered, np.concatenate([pattern(at, counts[at], dtype) for at in range(size)]))
            piece = transport.reducescatter(buffer_of(pattern(rank, total, dtype), dtype), counts)
            expect(piece, reduced(size, total, dtype)[start : start + counts[rank]])
    for table in ([[0, 1_300, 0], [1, 1_301, 1], [2, 1_302, 2]], [[0, 0, 0], [3, 0, 1], [2_100, 2_100, 2_100]]):
        send, receive = table[rank], [table[source][rank] for source in range(size)]
        values = [np.arange(count) + 10_000 * rank + 5_000 * at for at, count in enumerate(send)]
        received = transport.alltoall(buffer_of(np.concatenate(values), "int64"), send, receive)
        expected = [np.arange(count) + 10_000 * at + 5_000 * rank for at, count in enumerate(receive)]
        expect(received, np.concatenate(expected))


def count_in_small_steps(transport: MpiTransport) -> None:
    size, usual = transport.size, mpi_library.LARGEST_COUNT
    mpi_library.LARGEST_COUNT = 1000
    try:
        for dtype in ("float32", "float16"):
            buffer = buffer_of(pattern(transport.rank, 3_500), dtype)
            transport.allreduce(buffer)
            expect(buffer, reduced(size, 3_500))
            transport.broadcast(buffer, 0)
        specs = [BucketSpec("float32", 2_001), BucketSpec("float32", 2_000, wire="float16"), BucketSpec("int8", 1_001)]
        buckets = transport.open_buckets(specs)
        for index, spec in enumerate(specs):
            buckets.memory[index].array[:] = pattern(transport.rank, spec.count)
            buckets.start(index)
        for index, spec in enumerate(specs):
            buckets.wait(index)
            expect(buckets.memory[index], reduced(size, spec.count))
        buckets.close()
        check_other_collectives(transport)
    finally:
        mpi_library.LARGEST_COUNT = usual


@pytest.mark.ranks
def test_more_elements_than_mpi_can_count_go_in_parts() -> None:
    run_ranks(3, count_in_small_steps, transport="mpi")


def find_nodes(transport: MpiTransport) -> list[int]:
    return transport.find_nodes()


@pytest.mark.ranks
def test_ranks_that_share_memory_are_on_one_host() -> None:
    assert run_ranks(3, find_nodes, transport="mpi") == [[0] * 3] * 3


def end_with_messages_under_way(transport: MpiTransport) -> list[int]:
    mail = transport.open_mailbox()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_mailbox, "_open", weakref.WeakSet([mail]))
        time.sleep(0.2 * (transport.rank == transport.size - 1))
        for peer in range(transport.size) if transport.rank == 0 else [0]:
            mail.send(peer, b"the last one")
        mpi_mailbox.wait_for_last_messages()
        received = [int(count) for count in mail._received]
        transport.barrier()
        mail.close(idle=False)
    return received


@pytest.mark.ranks
def test_the_last_messages_have_arrived_when_a_rank_ends() -> None:
    received = run_ranks(4, end_with_messages_under_way, transport="mpi")
    assert received == [[0, 1, 1, 1], *[[1, 0, 0, 0]] * 3]


def _closed_buckets(opener: str, busy: tuple[int, ...]) -> list[bool]:
    """Whether MPI still has the communicator of some buckets, at their end and after the next transport's.

    busy: ranks that begin one more bucket than the others, and give it up.
    """
    transport = OPENERS[opener]()
    buckets: Any = transport.open_buckets([BucketSpec("float32", 40_000) for _ in range(2)])
    comms = [] if buckets._crossing is None else [buckets._crossing._wire.comm]
    for index in range(2):
        if index == 0 or transport.rank in busy:
            buckets.memory[index].array[:] = 1
            buckets.start(index)
    buckets.wait(0)
    transport.barrier()
    buckets.close()
    for _ in range(20):
        transport.barrier()
        free_released()
    kept = [bool(comm) for comm in comms]
    transport.close()
    transport = OPENERS[opener]()
    buckets = transport.open_buckets([BucketSpec("float32", 40_000)])
    buckets.memory[0].array[:] = transport.rank
    buckets.start(0)
    buckets.wait(0)
    assert (buckets.memory[0].array == 3).all()
    buckets.close()
    transport.close()
    return kept + [bool(comm) for comm in comms]


@pytest.mark.ranks
@pytest.mark.parametrize("opener", ["mpi", "hierarchical_uneven"])
@pytest.mark.parametrize("busy", [(), (0, 1), (0,)], ids=["none", "0 and 1", "0"])
def test_ranks_agree_on_the_communicator_of_a_bucket_that_was_given_up(opener: str, busy: tuple[int, ...]) -> None:
    found = run_ranks(3, _closed_buckets, opener, busy)
    if opener != "mpi":
        assert found.pop() == []  # rank 2 reduces nothing between the hosts
    assert found == [[bool(busy)] * 2] * len(found)
