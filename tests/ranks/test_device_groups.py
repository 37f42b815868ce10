"""What a process group of torch does with backends that are not Gloo: torch's sources tell, no GPU runs here.

A backend of an accelerator connects at its first operation, reports errors beside its operations, and is ended by
methods whose names depend on the version of torch.
"""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from hvdkit.errors import RankLostError, TransportError
from hvdkit.torch.device import accelerator, backend, calls, collectives, group, groups, variables
from hvdkit.torch.device.accelerator import Accelerator
from hvdkit.torch.device.group import TorchGroup
from hvdkit.transport.api import Transport

CPU = torch.device("cpu")


class LateGloo:
    """A backend that reads the store at its first operation only, as XCCL does."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        self._arguments: tuple[Any, int, int, Any] = store, rank, size, timeout
        self._gloo: Any = None

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Connect if this is the first operation."""
        if self._gloo is None:
            self._gloo = dist.ProcessGroupGloo(*self._arguments)
        return self._gloo.allreduce(tensors, options)


def _reduce_late(transport: Transport) -> float:
    with mock.patch.dict(dist.Backend._plugins, {"LATE": (LateGloo, False)}):
        late = TorchGroup(transport, Accelerator(CPU), "late", "here", "a test", one_host=True, timeout_s=30)
    x = torch.full((3,), float(transport.rank + 1))
    for work in collectives.all_reduce(late, [x], "sum"):
        late.join(work)
    late.close()
    return x[0].item()


@pytest.mark.ranks
def test_a_backend_that_connects_at_its_first_operation_connects_in_time() -> None:
    assert run_ranks(3, _reduce_late, transport="shared_memory") == [6.0] * 3


def _end_a_child(transport: Transport) -> int:
    opened = groups.open_group(transport, CPU, groups.DeviceSettings("torch"))
    assert opened is not None
    child = os.fork()
    if not child:
        known = len(groups._groups)
        groups._end()  # as at the end of Python
        opened.backend = backend.Backend("gloo", None)
        os._exit(known)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    x = torch.ones(2)
    for work in collectives.all_reduce(opened, [x], "sum"):
        opened.join(work)
    assert x.tolist() == [3.0, 3.0]
    groups.close_groups()
    return status


@pytest.mark.ranks
def test_a_forked_child_ends_without_the_threads_of_its_parents_groups() -> None:
    assert run_ranks(3, _end_a_child, transport="shared_memory", fresh=True) == [0] * 3


class Work:
    """An operation of a device. done: it has ended."""

    done = True

    def is_completed(self) -> bool:
        """See torch."""
        return self.done

    def wait(self) -> None:
        """See torch."""


class Library:
    """ProcessGroupNCCL. called: its methods so far, without those that only read."""

    def __init__(self, *, old: bool = False) -> None:
        self.called: list[str] = []
        self.error = "SUCCESS"
        self.ended = threading.Event()
        for name in ("_shutdown",) if old else ("abort", "shutdown", "get_error"):
            setattr(self, name, getattr(self, f"do_{name}"))

    def do_abort(self) -> None:
        """Of torch 2.6 and later."""
        self.called.append("abort")
        self.ended.set()

    def do_shutdown(self) -> None:
        """Of torch 2.6 and later."""
        self.called.append("shutdown")

    def do__shutdown(self) -> None:
        """Of torch up to 2.5, where it aborts."""
        self.called.append("_shutdown")
        self.ended.set()

    def do_get_error(self) -> Any:
        """Of torch 2.7 and later."""
        return SimpleNamespace(name=self.error)

    def allreduce(self, *_: Any) -> Work:
        """See torch."""
        self.called.append("allreduce")
        return Work()


class OnDevice(Accelerator):
    """The CPU in place of an accelerator, which orders the operations by itself."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.on_host = False


class Peers:
    """A transport of three ranks. lost: one of them has ended."""

    rank, size, lost = 0, 3, False

    def check(self) -> None:
        """See Transport."""
        if self.lost:
            raise RankLostError("Rank 2 was lost.")


def _group(library: Library, kind: str = "nccl", peers: Peers | None = None) -> TorchGroup:
    with mock.patch.object(TorchGroup, "_connect", lambda *_: library):
        transport: Any = peers or Peers()
        made = TorchGroup(transport, OnDevice(), kind, "rank 0", "a test", one_host=True, timeout_s=1)
    made.begin(calls.allreduce(made.backend, [torch.ones(1)], "sum"))
    return made


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_EXPLAIN_S", 0.0)
    monkeypatch.setattr(group, "_CLOSE_S", 0.1)
    monkeypatch.setattr(group, "_LEAVE_S", 0.1)


@pytest.mark.parametrize("old", [False, True], ids=["torch 2.6", "torch 2.4"])
def test_operations_are_ended_by_the_method_of_each_version(old: bool) -> None:
    library = Library(old=old)
    failed = _group(library)
    failed.fail(RankLostError("Rank 1 was lost."))
    assert library.ended.wait(30) and library.called == ["allreduce", "_shutdown" if old else "abort"]


@pytest.mark.parametrize("old", [False, True], ids=["torch 2.6", "torch 2.4"])
@pytest.mark.parametrize("end", [TorchGroup.close, TorchGroup.leave], ids=["close", "leave"])
def test_a_group_is_shut_down_before_it_is_dropped(end: Any, old: bool) -> None:
    library = Library(old=old)
    end(_group(library))
    assert library.called == ["allreduce", "_shutdown" if old else "shutdown"]


@pytest.mark.parametrize("look", [TorchGroup.inspect, TorchGroup.wait_for_stream], ids=["watch", "wait"])
def test_an_error_that_the_watchdog_has_seen_fails_the_group(look: Any) -> None:
    library = Library()
    failed = _group(library)
    library.error = "COMM_ERROR"
    if look is TorchGroup.inspect:
        look(failed)
    else:
        with pytest.raises(TransportError):
            look(failed)
    with pytest.raises(TransportError, match=r"it has reported an error of the network.*were ended"):
        failed.check()
    assert library.ended.wait(30), "waits for the device would hang"


def test_an_error_of_a_slow_operation_fails_the_group_on_torch_without_get_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Work) -> None:
        raise RuntimeError("NCCL error: remote process exited or there was a network error")

    library = Library(old=True)
    failed = _group(library)
    monkeypatch.setattr(group, "_SLOW_S", -1.0)
    monkeypatch.setattr(Work, "wait", fail)
    failed.inspect()
    with pytest.raises(TransportError, match=r"an operation of a test .*there was a network error"):
        failed.check()
    assert library.ended.wait(30), "waits for the device would hang"


def test_close_does_not_hang_in_a_library_that_does() -> None:
    library, free = Library(), threading.Event()
    library.shutdown = library.abort = free.wait  # type: ignore[attr-defined]
    _group(library).close()
    free.set()


def test_what_xccl_cannot_do_is_said() -> None:
    failed = _group(Library(), "xccl")
    assert "XCCL cannot end its operations" in str(failed.fail(RankLostError("Rank 1 was lost.")))


def test_a_group_keeps_no_operation_that_has_ended() -> None:
    made = _group(Library())
    made.wait_for_stream()
    assert not made._begun


def test_xccl_without_options_is_made_without() -> None:
    made: list[Any] = []

    class Base:
        class Options:
            def __init__(self, name: str) -> None:
                """See torch."""

    class Xccl(Base):
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)

    with mock.patch.object(dist, "ProcessGroupXCCL", Xccl, create=True):
        backend.make_backend("xccl", "store", 1, 3, CPU, one_host=True)
    assert made == [("store", 1, 3)]


@pytest.mark.parametrize(
    "name, value, mode",
    [("", "", "0"), ("TORCH_NCCL_DESYNC_DEBUG", "1", "2"), ("NCCL_DESYNC_DEBUG", "1", "2")],
    ids=["usual", "desync", "desync, old"],
)
def test_desync_debugging_does_not_make_the_watchdog_end_the_process(
    name: str, value: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG"):
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, value)
    assert variables.nccl_variables()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == mode


def test_operations_run_on_the_stream_of_the_backend() -> None:
    for name in ("AllreduceOptions", "AllgatherOptions", "ReduceScatterOptions", "BroadcastOptions", "AllToAllOptions"):
        kind = getattr(dist.distributed_c10d, name)
        if hasattr(kind, "asyncOp"):
            with mock.patch.object(dist.distributed_c10d, name, lambda kind=kind: _synchronous(kind)):
                assert calls._options(name).asyncOp


def _synchronous(kind: Any) -> Any:
    options = kind()
    options.asyncOp = False
    return options


@pytest.mark.parametrize(
    "named, built, expected",
    [
        ("cuda", "13.0", "cuda"),
        (None, "13.0", "cuda"),  # torch 2.6 on a host without a GPU
        (None, None, ""),
        ("mps", None, ""),
    ],
    ids=["GPU", "no GPU", "CPU", "Apple"],
)
def test_the_type_of_device_is_that_of_the_build(
    named: str | None, built: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = None if named is None else torch.device(named)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.version, "cuda", built)
    assert accelerator.built_for() == expected


def test_devices_with_one_uuid_differ_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> Any:
        return SimpleNamespace(uuid="58580000", pci_domain_id=0, pci_bus_id=index + 3, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    names = [accelerator.identify(torch.device("cuda", index)) for index in (0, 1, 0)]
    assert names[0] == names[2] != names[1]


def test_a_version_of_nccl_may_have_a_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7, "rc1"))
    monkeypatch.setattr(groups, "_groups", {("key",): SimpleNamespace(kind="nccl")})
    assert groups.opened_version() == (2, 30, 7)
