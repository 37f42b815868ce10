"""An operation that fails or hangs on one rank, when all ranks have come to it: all others are told of it."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import product
from pipe_ranks import PipeTransport
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.config import Config
from hvdkit.engine.groups import global_process_set
from hvdkit.engine.named import execution
from hvdkit.engine.named.execution import Work
from hvdkit.engine.named.operation import Operation, OperationRequest
from hvdkit.engine.named.step_runner import StepRunner
from hvdkit.engine.named.submit import collective_step
from hvdkit.errors import ConfigError, HorovodInternalError, LocalFailureError
from hvdkit.transport.api import Transport

pytestmark = pytest.mark.native("Horovod does its operations itself")

OVERS = ["mpi", "shared_memory", "hierarchical_pairs", "gloo"]
#: Over a hierarchical transport an operation is one over shared memory, then one over MPI.
HIERARCHICAL = pytest.param("hierarchical_pairs", marks=pytest.mark.slow)
MPI = pytest.param("mpi", marks=pytest.mark.slow)


def _together(action: Callable[[Transport, Sequence[int]], Any]) -> Any:
    return collective_step(global_process_set.group("the test").engine, "broadcast_parameters", action)


def _no_memory(*_: object) -> None:
    raise MemoryError("no memory left")


def _gather() -> None:
    """Fails before its only collective."""
    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == 1:
            patch.setitem(execution._COLLECTIVES, "allgather", _no_memory)
        hvd.allgather(torch.ones(3))


def _sum() -> None:
    """Fails where the sum is begun: large enough for shared memory."""
    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == 1:
            patch.setattr(execution, "reduce_scaled", _no_memory)
        hvd.synchronize(hvd.allreduce_async(torch.ones(100_000)))


def _act(before: int, after: int) -> None:
    """Fails between collectives."""

    def action(transport: Transport, _: Sequence[int]) -> None:
        for _turn in range(before):
            transport.barrier()
        if hvd.rank() == 1:
            _no_memory()
        for _turn in range(after):
            transport.barrier()

    _together(action)


def _scatter() -> None:
    """Fails between the steps of an exchange in shared memory."""
    arithmetic = type(global_process_set.group("the test").transport.arithmetic)
    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == 1:
            patch.setattr(arithmetic, "combine", _no_memory)
        hvd.reducescatter(torch.ones(6_000_000, dtype=torch.bfloat16), op=hvd.Sum)


FAILURES: dict[str, Callable[[], None]] = {
    "allgather": _gather,
    "allreduce": _sum,
    "reducescatter": _scatter,
    "action, first": lambda: _act(0, 1),
    "action, between": lambda: _act(2, 1),
    "action, last": lambda: _act(1, 0),
    "action, alone": lambda: _act(0, 0),
}


def _error_of(call: Callable[[], object]) -> str:
    """What a call ends with, some time: who has done its part before another one fails hears of that soon."""
    with pytest.raises(HorovodInternalError) as caught:
        for _ in range(100):
            call()
            time.sleep(0.02)
    return str(caught.value)


def _fails_on_one(over: str) -> list[list[str]]:
    """What each failure, and the next operation after it, ends with."""
    found = []
    for name, fail in FAILURES.items():
        with joined(over):
            hvd.barrier()
            found.append([name, _error_of(fail), _error_of(lambda: hvd.allreduce(torch.ones(2)))])
    with joined(over):
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3.0, 3.0]
    return found


@pytest.mark.parametrize("over", [MPI, "shared_memory", HIERARCHICAL, "gloo"])
def test_an_error_of_one_rank_is_told_to_all(over: str) -> None:
    for found in run_ranks(3, _fails_on_one, over, timeout=90):
        assert len(found) == len(FAILURES)
        for name, *said in found:
            for text in said:
                assert "rank 1 (host" in text and "MemoryError: no memory left" in text, (name, text)


def _fails_on_all(over: str) -> list[str]:
    said = []
    with joined(over):
        for before in (0, 2):

            def action(transport: Transport, _: Sequence[int], before: int = before) -> None:
                for _turn in range(before):
                    transport.barrier()
                raise LookupError(f"after {before}")

            with pytest.raises(LookupError) as caught:
                _together(action)
            said.append(str(caught.value))
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3.0, 3.0]
    return said


@pytest.mark.parametrize("over", OVERS)
def test_an_action_that_fails_alike_on_all_ranks_leaves_the_engine_usable(over: str) -> None:
    assert run_ranks(3, _fails_on_all, over, timeout=60) == [["after 0", "after 2"]] * 3


def _looks_at_the_sky(folder: Path) -> None:
    """Hang until the others have seen what they are to see, or for 15 s."""
    end = time.monotonic() + 15
    while time.monotonic() < end and len(list(folder.iterdir())) < 2:
        time.sleep(0.05)


def _hangs(over: str, folder: Path) -> str:
    def action(transport: Transport, _: Sequence[int]) -> None:
        transport.barrier()
        if hvd.rank() == 1:
            _looks_at_the_sky(folder)
        transport.barrier()

    with joined(over, stall_check_s=0.5, stall_shutdown_s=1.5):
        try:
            _together(action)
        except HorovodInternalError as error:
            if hvd.rank() != 1:
                (folder / str(hvd.rank())).touch()
            return str(error)
    return "no error"


@pytest.mark.parametrize("over", [MPI, "shared_memory", HIERARCHICAL, "gloo"])
def test_a_rank_that_hangs_in_an_operation_is_named_and_the_wait_ends(over: str, tmp_path: Path) -> None:
    for text in run_ranks(3, _hangs, over, tmp_path, timeout=60):
        assert "broadcast_parameters" in text and "has been running" in text and "aborted after" in text
        assert "rank 0 (host" in text.partition("Waiting for other ranks: ")[2].partition("\n")[0], "who waits"
        assert "Neither done nor waiting: rank 1 (host" in text and "_looks_at_the_sky" in text


def _fails_when_others_have_left(over: str, failing: int, folder: Path) -> str:
    def action(transport: Transport, _: Sequence[int]) -> None:
        transport.barrier()
        if hvd.rank() == failing:
            end = time.monotonic() + 15
            while time.monotonic() < end and not list(folder.iterdir()):
                time.sleep(0.05)
            time.sleep(0.5)  # the other one is in shutdown() by then; if not, the error is the same
            _no_memory()

    with joined(over):
        rank, said = hvd.rank(), ""
        try:
            _together(action)
        except HorovodInternalError as error:
            said = str(error)
        if rank != failing:
            (folder / "left").touch()
    return said


@pytest.mark.parametrize(
    ("over", "failing"),
    product(OVERS, [0, 1], quick=lambda over, failing: (over, failing) in (("shared_memory", 0), ("gloo", 1))),
)
def test_an_error_ends_the_wait_for_ranks_that_have_shut_down(over: str, failing: int, tmp_path: Path) -> None:
    found = run_ranks(2, _fails_when_others_have_left, over, failing, tmp_path, timeout=60)
    assert "MemoryError: no memory left" in found[failing] and f"rank {failing} (host" in found[failing]


@pytest.mark.parametrize(
    ("error", "kind"), [(KeyError("own"), LocalFailureError), (ConfigError("hvdkit's"), HorovodInternalError)]
)
def test_an_exception_of_the_ranks_own_is_a_local_failure_where_rank_0_has_left(
    error: Exception, kind: type[Exception]
) -> None:
    """Rank 0, which would say whether the step has failed on all ranks alike, says nothing any more."""

    def fail() -> None:
        raise error

    asked = OperationRequest("allreduce", (("float32", (2,)),), ())
    runner = StepRunner(
        PipeTransport(1, {0: Pipe()[0]}),
        Config(),
        send=lambda *_: None,
        talk=lambda: False,
        talking=threading.RLock(),
        closed=lambda: True,
        failed=lambda *_: None,
        who="rank {}".format,
        notice_s=60.0,
    )
    failure = runner.do(Work([Operation("x", asked, [])], fail))
    assert type(failure) is kind and failure.__cause__ is error
    assert str(failure) == f"{type(error).__name__}: {error} (on rank 1)"


def _fails_at_writing(over: str) -> None:
    for failing in (0, 1):
        with joined(over), pytest.MonkeyPatch.context() as patch:
            if hvd.rank() == failing:
                patch.setattr(execution, "reduce_scaled", _no_memory)
            error = _error_of(lambda: hvd.allreduce(torch.ones(2)))
            assert f"rank {failing} (host" in error and "MemoryError: no memory left" in error


def test_ranks_shut_down_after_an_error_of_one_in_a_small_operation() -> None:
    run_ranks(2, _fails_at_writing, "shared_memory", timeout=60)


def _lacks_memory_on_one_host() -> str:
    with joined("hierarchical_pairs"), pytest.MonkeyPatch.context() as patch:
        if hvd.rank() < 2:
            patch.setattr("hvdkit.transport.shared.segment.os.posix_fallocate", _no_space)
        return _error_of(lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(100_000))))


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space")


@pytest.mark.slow
def test_too_little_shared_memory_on_one_host_is_told_to_the_others() -> None:
    for text in run_ranks(4, _lacks_memory_on_one_host, timeout=60):
        assert "Shared memory on " in text and " MiB are free" in text
