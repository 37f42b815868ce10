"""Shared memory itself: too little of it, none in common, nothing left behind; and buckets that take turns in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from bucket_checks import BUCKET_CHECKS
from cases import product
from numbers_of_ranks import buffer_of, expect, pattern, reduced
from ranks import RanksFailedError, run_ranks

from hvdkit.errors import SharedMemoryError
from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.mpi.transport import open_mpi
from hvdkit.transport.shared import steps
from hvdkit.transport.shared.segment import open_segment
from hvdkit.transport.shared.steps import Flags, flag_bytes
from hvdkit.transport.shared.transport import SharedMemoryTransport

SIZE = 3
MIB = 2**20


def open_shared(directory: str) -> SharedMemoryTransport:
    base = open_mpi()
    return SharedMemoryTransport(base, base, host="here", directory=directory)


# Too little ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_directory(tmp_path: Path) -> Iterator[tuple[str, bool]]:
    """A directory with room for 1 MiB, and True; or where nothing can be mounted any directory, and False."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=10).returncode:
        yield str(tmp_path), False
        return
    yield str(tmp_path), True
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True, timeout=10)


def _no_space(descriptor: int, offset: int, length: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def ask_for_too_much(directory: str, refusing: int | None) -> tuple[str, float]:
    """The error of a large allreduce; and what the ranks can still do together. refusing: the rank without space."""
    transport = open_shared(directory)
    array = np.full(MIB, transport.rank, np.float32)
    granted = os.posix_fallocate
    if transport.rank == refusing:
        os.posix_fallocate = _no_space
    try:
        with pytest.raises(SharedMemoryError) as caught:
            transport.allreduce(Buffer(array, "float32"))
    finally:
        os.posix_fallocate = granted
    small = buffer_of([transport.rank], "float32")
    transport.allreduce(small)
    transport.close()
    return str(caught.value), float(small.array[0])


@pytest.mark.ranks
def test_too_little_shared_memory_is_an_error_on_every_rank(small_directory: tuple[str, bool]) -> None:
    directory, mounted = small_directory
    answers = run_ranks(SIZE, ask_for_too_much, directory, None if mounted else 1)
    for message, total in answers:
        found = re.search(rf"needs ([\d.]+) MiB in {directory}, but only ([\d.]+) MiB", message)
        assert found, message
        needed, free = map(float, found.groups())
        # Another rank may hold its part still while this one looks.
        assert needed >= SIZE * 2 and (not mounted or 0 <= free <= 1.0)
        assert "No space left on device" in message and "set HVDKIT_TRANSPORT=mpi" in message
        assert total == 0 + 1 + 2
    assert os.listdir(directory) == []


# Not in common ------------------------------------------------------------------------------------------------------


def open_in_containers(shared: str, own: str) -> str:
    """The error of ranks of which the last one sees another directory under the same name."""
    base = open_mpi()
    opened = os.open
    if base.rank == base.size - 1:
        os.open = lambda path, *more: opened(path.replace(shared, own), *more)
    try:
        with pytest.raises(SharedMemoryError) as caught:
            SharedMemoryTransport(base, base, host="here", directory=shared)
    finally:
        os.open = opened
    base.barrier()
    base.close()
    return str(caught.value)


@pytest.mark.ranks
def test_ranks_that_see_different_directories_are_told_so(tmp_path: Path) -> None:
    shared, own = tmp_path / "shm", tmp_path / "other"
    shared.mkdir()
    own.mkdir()
    for message in run_ranks(SIZE, open_in_containers, str(shared), str(own)):
        assert f"do not share {shared}" in message and "local rank 2: No such file" in message
        assert "docker --ipc=host" in message and "set HVDKIT_TRANSPORT=mpi" in message
    assert list(tmp_path.glob("*/*")) == []


def open_nowhere(directory: str) -> str:
    base = open_mpi()
    with pytest.raises(SharedMemoryError) as caught:
        SharedMemoryTransport(base, base, host="here", directory=directory)
    base.close()
    return str(caught.value)


@pytest.mark.ranks
def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    for message in run_ranks(2, open_nowhere, str(tmp_path / "missing")):
        assert (
            re.search(rf"{tmp_path}/missing on \S+: local rank 0: No such file", message)
            and "HVDKIT_TRANSPORT=mpi" in message
        )


# Nothing left behind ------------------------------------------------------------------------------------------------


def open_and_close(directory: str) -> tuple[list[str], list[str]]:
    transport = open_shared(directory)
    buckets = transport.open_buckets([BucketSpec("float32", 1000)] * 3)
    transport.allreduce(buffer_of(np.zeros(MIB), "float32"))
    transport.barrier()
    opened = os.listdir(directory)
    transport.barrier()
    buckets.close()
    transport.close()
    return opened, os.listdir(directory)


@pytest.mark.ranks
def test_no_file_is_left_once_memory_is_open_or_closed(tmp_path: Path) -> None:
    assert run_ranks(SIZE, open_and_close, str(tmp_path)) == [([], [])] * SIZE


def be_killed(directory: str) -> None:
    transport = open_shared(directory)
    transport.open_buckets([BucketSpec("float32", 1000)])
    transport.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks
def test_killed_ranks_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(SIZE, be_killed, str(tmp_path), fresh=True)
    assert not caught.value.tracebacks and caught.value.ended
    assert os.listdir(tmp_path) == []


def be_killed_while_opening(directory: str) -> None:
    os.posix_fallocate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    open_shared(directory)


@pytest.mark.ranks
def test_what_ranks_left_that_were_killed_while_opening_is_gone_at_the_next_start(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError):
        run_ranks(SIZE, be_killed_while_opening, str(tmp_path), fresh=True)
    (left,) = tmp_path.iterdir()
    assert run_ranks(SIZE, open_and_close, str(tmp_path)) == [([left.name], [left.name])] * SIZE  # it is young
    others = [tmp_path / name for name in ("hvdkit-in-use", "somebodys", "hvdkit-young")]
    for one in others:
        one.touch()
    (tmp_path / "hvdkit-link").symlink_to(others[1])
    for one in (left, *others[:2]):
        os.utime(one, (0, 0))
    with others[0].open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        kept = sorted(["hvdkit-link", *(one.name for one in others)])
        for opened, closed in run_ranks(SIZE, open_and_close, str(tmp_path)):
            assert sorted(opened) == sorted(closed) == kept


def open_file(directory: str, umask: int) -> tuple[int, int]:
    group = open_mpi()
    before = os.umask(umask)
    segment = open_segment(group, [100] * group.size, directory)
    os.umask(before)
    group.barrier()
    status = os.fstat(segment.descriptor)
    segment.close()
    segment.close()
    group.close()
    return status.st_mode & 0o777, status.st_nlink


@pytest.mark.ranks
@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_the_memory_is_for_this_user_alone_and_nameless(umask: int, tmp_path: Path) -> None:
    assert run_ranks(2, open_file, str(tmp_path), umask) == [(0o600, 0)] * 2


def look_at_it_later(directory: str) -> float:
    transport = open_shared(directory)
    buckets = transport.open_buckets([BucketSpec("float32", 5)])
    memory = buckets.memory[0].array
    memory[:] = transport.rank
    buckets.close()
    transport.close()
    return float(memory.sum())


@pytest.mark.ranks
def test_memory_that_is_still_looked_at_outlives_its_buckets(tmp_path: Path) -> None:
    assert run_ranks(2, look_at_it_later, str(tmp_path)) == [0.0, 5.0]


# Taking turns -------------------------------------------------------------------------------------------------------

COUNTS = (1, 5_003, 1_009, 20_011, 0, 17, 3_001)
ROUNDS = 30


def take_turns(directory: str, depth: int) -> int:
    """Rounds of buckets at a random pace; by how many buckets this rank ever was ahead of another one."""
    transport = open_shared(directory)
    rank, size = transport.rank, transport.size
    buckets = transport.open_buckets([BucketSpec("float32", count) for count in COUNTS], depth)
    board = open_segment(open_mpi(), [64 * size] + [0] * (size - 1), directory)
    started = board.memory.view(np.int64)[:: 64 // 8]
    dice, ahead = random.Random(rank), 0

    def collect(number: int) -> None:
        index = number % len(COUNTS)
        buckets.wait(index)
        if dice.random() < 0.1:
            time.sleep(0.003)
        values = buckets.memory[index].array
        expected = reduced(size, COUNTS[index]) + size * number
        np.testing.assert_array_equal(values, expected, err_msg=f"bucket {number}")

    for number in range(len(COUNTS) * ROUNDS):
        index = number % len(COUNTS)
        if index >= depth:
            collect(number - depth)
        if dice.random() < 0.1:
            time.sleep(0.003)
        started[rank] = number + 1
        ahead = max(ahead, number + 1 - int(started.min()))
        buckets.memory[index].array[:] = pattern(rank, COUNTS[index]) + number
        buckets.start(index)
        if index == len(COUNTS) - 1:
            for last in range(number + 1 - depth, number + 1):
                collect(last)
    transport.barrier()
    buckets.close()
    board.close()
    transport.close()
    return ahead


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "depth"),
    product([2, 3], [1, 2, 3, len(COUNTS)], quick=lambda size, depth: (size, depth) in ((2, 1), (3, 2))),
)
def test_buckets_share_little_memory_and_no_rank_runs_away(size: int, depth: int, tmp_path: Path) -> None:
    ahead = run_ranks(size, take_turns, str(tmp_path), depth)
    assert max(ahead) <= depth, ahead


def measure_memory(directory: str, count: int, depth: int | None) -> int:
    transport = open_shared(directory)
    buckets = transport.open_buckets([BucketSpec("float32", MIB // 4)] * count, depth)
    nbytes = int(buckets._steps.segment.memory.nbytes)
    transport.barrier()
    buckets.close()
    transport.close()
    return nbytes


@pytest.mark.ranks
def test_memory_grows_with_the_depth_and_not_with_the_model(tmp_path: Path) -> None:
    few, many = (run_ranks(2, measure_memory, str(tmp_path), count, 2)[0] for count in (4, 40))
    assert many - few < MIB / 4 and few <= (2 + 1) * 2 * MIB + MIB / 4


# Flags --------------------------------------------------------------------------------------------------------------


def fenced(transport: Transport, check: str) -> None:
    free, steps.order = steps.order, steps._fence
    try:
        BUCKET_CHECKS[check](transport)
    finally:
        steps.order = free


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shared_memory_only", "hierarchical_pairs"])
@pytest.mark.parametrize("check", ["buckets_generations_of_hasty_ranks", "buckets_progress_by_whoever_has_time"])
def test_processors_that_reorder_stores_get_a_fence(check: str, transport: str) -> None:
    run_ranks(SIZE, fenced, check, transport=transport)


def test_flags_count_rounds_of_each_rank_and_index() -> None:
    memory = np.zeros(flag_bytes(3, 9), np.uint8)
    ranks = [Flags(memory, rank=rank, ranks=3, count=9) for rank in range(3)]
    assert memory.nbytes == 3 * 2 * 64
    assert [ranks[0].show(8), ranks[0].show(8), ranks[1].show(8)] == [1, 2, 1]
    assert ranks[2].everyone(8, 1) and not ranks[2].everyone(8, 2)
    assert not ranks[0].everyone(8, 1), "rank 2 has not shown anything"
    assert ranks[0].everyone(8, 0) and not ranks[2].everyone(7, 1)
    for one in ranks:
        one.close()


def show_interrupted(flags: Flags, after: int) -> bool:
    """Show a step that KeyboardInterrupt ends after so many instructions of show(); False if it has fewer."""
    done = itertools.count()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not Flags.show.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(done) == after:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        flags.show()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_peers_do_not_see_a_step_that_its_rank_would_show_again() -> None:
    for after in itertools.count():
        memory = np.zeros(flag_bytes(3, 1), np.uint8)
        flags = Flags(memory, rank=1, ranks=3, count=1)
        interrupted = show_interrupted(flags, after)
        assert memory.view(np.int64)[8] <= flags.shown[0], f"after {after} instructions"
        flags.close()
        if not interrupted:
            assert after > 10 and flags.shown == [1]
            break


@pytest.mark.parametrize("order", [steps._fence, steps._no_fence])
def test_what_was_written_before_a_flag_is_seen_after_it(order: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "order", order)
    memory, box = np.zeros(flag_bytes(2, 1), np.uint8), np.zeros(1000)
    writer, reader = (Flags(memory, rank=rank, ranks=2, count=1) for rank in range(2))

    def write() -> None:
        for number in range(1, 200):
            while not writer.everyone(0, number - 1):
                time.sleep(0)
            box[:] = number
            writer.show(0)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    with contextlib.closing(reader):
        for number in range(1, 200):
            while not reader.everyone(0, number):
                time.sleep(0)
            assert (box == number).all()
            reader.show(0)
        thread.join(10)
        assert not thread.is_alive()
    writer.close()


def allreduce_through_the_stage(transport: Transport) -> None:
    # One stage, a part of one, several, and dtypes that take turns in the same memory.
    for count, dtype in ((MIB, "float32"), (MIB + 1, "float32"), (70_001, "float16"), (3 * MIB, "int32"), (9, "bool")):
        buffer = buffer_of(pattern(transport.rank, count, dtype), dtype)
        transport.allreduce(buffer)
        expect(buffer, reduced(transport.size, count, dtype), f"{dtype} {count}")


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 3])
def test_large_tensors_go_through_the_stage_piece_by_piece(size: int) -> None:
    run_ranks(size, allreduce_through_the_stage, transport="shared_memory_only")


def share_in_several_steps(transport: Transport) -> None:
    """What is larger than a step of the memory that ranks share, and does not divide by it."""
    rank, size = transport.rank, transport.size
    for count in (MIB + 3, 5 * MIB + 1):
        buffer = buffer_of(pattern(rank, count), "float32")
        transport.broadcast(buffer, size - 1)
        expect(buffer, pattern(size - 1, count), f"broadcast of {count}")
    counts = [200_000 + 1000 * at for at in range(size)]
    ends = np.cumsum([0, *counts])
    gathered = transport.allgather(buffer_of(pattern(rank, counts[rank]), "float32"), counts)
    expect(gathered, np.concatenate([pattern(at, one) for at, one in enumerate(counts)]), "allgather")
    counts = [3 * one for one in counts]
    mine = slice(3 * ends[rank], 3 * ends[rank + 1])
    for dtype in ("float32", "bfloat16"):
        given = buffer_of(pattern(rank, sum(counts), dtype), dtype)
        expect(transport.reducescatter(given, counts), reduced(size, sum(counts), dtype)[mine], dtype)


@pytest.mark.ranks
def test_large_tensors_are_shared_in_several_steps() -> None:
    run_ranks(3, share_in_several_steps, transport="shared_memory_only")


def communicate_between_hosts(transport: Transport) -> None:
    """Every collective, small and large; hosts that are one machine would not notice memory that they cannot share."""
    assert isinstance(transport, SharedMemoryTransport)
    opened = []

    def note(kind: Any) -> Any:
        opened.append(kind)
        return open_memory(kind)

    open_memory, transport._open = transport._open, note  # type: ignore[method-assign]
    size = transport.size
    for count in (30, 600_000):  # numbers of all ranks
        counts = [count // size] * size
        buffer = buffer_of(pattern(transport.rank, count), "float32")
        pieces = [buffer_of(pattern(rank, counts[0]), "float32") for rank in range(size)]
        own = buffer.slice(0, counts[0])
        transport.allreduce(buffer)
        transport.broadcast(buffer, 0)
        transport.reducescatter(buffer, counts)
        transport.allgather(own, counts)
        transport.alltoall(buffer, counts, counts)
        transport.allgather_into(pieces, own)
        transport.reducescatter_into(own, buffer.pieces(counts))
        transport.alltoall_into(pieces, buffer.pieces(counts))
        transport.gather_into(pieces if transport.rank == 0 else [], own, 0)
    assert not opened


@pytest.mark.ranks
def test_ranks_of_several_hosts_open_no_memory_together() -> None:
    run_ranks(3, communicate_between_hosts, transport="hierarchical_uneven")
