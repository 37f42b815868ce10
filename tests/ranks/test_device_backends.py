"""Which backend of torch.distributed reduces tensors of a device, and how its object is made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from device_world import train_on_devices
from ranks import run_ranks
from torch_world import Case, assert_alike, joined, train_here

import hvdkit.torch as hvd
from hvdkit.errors import TransportError
from hvdkit.torch.device import groups, operations
from hvdkit.torch.device.backend import FOR_EVER, choose_backend, make_backend
from hvdkit.torch.device.store import ExchangeStore
from hvdkit.torch.device.variables import NCCL_VARIABLES, set_unless_given

pytestmark = pytest.mark.native("device memory is reduced by hvdkit's own engine")

MAP = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "mps": "gloo", "hpu": "hccl", "npu": "lost"}


@contextmanager
def _torch_with(*libraries: str) -> Iterator[None]:
    """A torch that has these libraries, and the package of one plug-in."""
    built: dict[str, Any] = {
        f"is_{name}_available": lambda has=name in libraries: has for name in ("gloo", "nccl", "xccl")
    }
    with (
        mock.patch.multiple(dist, create=True, **built),
        mock.patch.dict(dist.Backend.default_device_backend_map, MAP, clear=True),
        mock.patch.dict(dist.Backend._plugins, {"HCCL": (None, False)}, clear=True),
    ):
        yield


@pytest.mark.parametrize(
    "device, backend", [("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "xccl"), ("hpu", "hccl")], ids=lambda name: name
)
def test_each_type_of_device_has_its_backend(device: str, backend: str) -> None:
    with _torch_with("gloo", "nccl", "xccl"):
        assert choose_backend(device) == backend


@pytest.mark.parametrize(
    "device, libraries, reason",
    [
        ("mps", ["gloo"], "no backend for tensors on 'mps'; import the package that registers one"),
        ("qpu", ["gloo"], "no backend for tensors on 'qpu'; import the package that registers one"),
        ("npu", ["gloo"], "the backend 'lost' for tensors on 'npu' is not registered with torch.distributed"),
        ("cuda", ["gloo"], "this torch has no NCCL for tensors on 'cuda'; install a build of torch with it"),
        ("xpu", ["gloo"], "this torch has no XCCL for tensors on 'xpu'; install a build of torch with it"),
        ("cpu", [], "this torch has no GLOO for tensors on 'cpu'"),
    ],
    ids=lambda one: one if isinstance(one, str) and len(one) == 3 else "",
)
def test_a_device_without_a_backend_is_refused_with_the_cure(device: str, libraries: list[str], reason: str) -> None:
    with _torch_with(*libraries), pytest.raises(TransportError) as refused:
        choose_backend(device)
    assert reason in str(refused.value)


def test_a_torch_without_distributed_is_refused_with_the_cure() -> None:
    with mock.patch.object(dist, "is_available", lambda: False), pytest.raises(TransportError, match="install a wheel"):
        choose_backend("cpu")


def test_variables_are_set_for_a_while_and_those_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("A", "B", "C"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("B", "")
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="fails"), set_unless_given({"A": "1", "B": "2", "C": "3"}):
        assert (os.environ["A"], os.environ["B"], os.environ["C"]) == ("1", "", "3")
        del os.environ["C"]
        raise RuntimeError("the constructor fails")
    assert dict(os.environ) == before


class _Library:
    """ProcessGroupNCCL as far as make_backend() knows it; records the variables that its constructor sees."""

    class Options:
        is_high_priority_stream = False

    made: list[_Library]

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.connected: torch.device | None = None
        self.variables = {name: os.environ.get(name) for name in NCCL_VARIABLES}
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect."""
        self.connected = device


@pytest.mark.parametrize("name", ["nccl", "xccl"])
def test_the_watchdog_of_the_library_never_ends_the_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, *others = NCCL_VARIABLES
    for variable in others:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(own, "1")  # the user's
    monkeypatch.setattr(_Library, "made", [], raising=False)
    before = dict(os.environ)
    with mock.patch.object(dist, f"ProcessGroup{name.upper()}", _Library, create=True):
        backend = make_backend(name, "store", 1, 3, torch.device("cuda", 2), one_host=True)
    assert dict(os.environ) == before
    assert backend.variables == {**NCCL_VARIABLES, own: "1"}
    store, rank, size, options = backend.arguments
    assert (store, rank, size, options._timeout) == ("store", 1, 3, FOR_EVER) and options.is_high_priority_stream
    assert backend.connected == torch.device("cuda", 2), "it would connect later, with no one at the store"


@contextmanager
def _plug_in(extended: bool) -> Iterator[list[str]]:
    """Register the backend of a third party for the CPU; yields how it is called."""
    called: list[str] = []

    class Plugin(dist.ProcessGroup):
        """Its own class in Python, as torch allows, which leaves the work to Gloo."""

        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            super().__init__(rank, size)  # type: ignore[call-arg]
            self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

        def __getattribute__(self, name: str) -> Any:
            if name in ("allreduce", "allreduce_coalesced", "_allgather_base", "_reduce_scatter_base", "broadcast"):
                called.append(name)
                return getattr(self._gloo, name)
            return super().__getattribute__(name)

    def create(*arguments: Any) -> Any:
        called.append("made")
        if extended:
            options, own = arguments
            assert own is None and options.group_id and options.global_ranks_in_group == list(range(options.group_size))
            return Plugin(options.store, options.group_rank, options.group_size, options.timeout)
        store, rank, size, timeout = arguments
        assert isinstance(store, ExchangeStore)
        return Plugin(store, rank, size, timeout)

    kept = SimpleNamespace(names=list(dist.Backend.backend_list))
    with (
        mock.patch.dict(dist.Backend.default_device_backend_map, clear=True),
        mock.patch.dict(dist.Backend._plugins),
        mock.patch.dict(dist.Backend.backend_type_map),
        mock.patch.dict(dist.Backend.backend_capability),
    ):
        try:
            dist.Backend.register_backend("thirdparty", create, extended_api=extended, devices=["cpu"])
            yield called
        finally:
            dist.Backend.backend_list[:] = kept.names


def _train(case: Case, extended: bool, shard: str | None) -> tuple[Any, list[str]]:
    with _plug_in(extended) as called:
        return train_on_devices(case, settings={"fusion_bytes": 256}, shard=shard), called


@pytest.mark.ranks
@pytest.mark.parametrize(
    "extended, shard", [(False, None), (True, None), pytest.param(True, "gradients", marks=pytest.mark.slow)]
)
def test_the_registered_backend_of_a_third_party_reduces_gradients(extended: bool, shard: str | None) -> None:
    case = Case("Adam", {"lr": 0.01}, steps=5)
    results = run_ranks(3, _train, case, extended, shard)
    assert_alike([weights for weights, _ in results], train_here(case, 3), 1e-10)
    for _, called in results:
        assert called[0] == "made" and called.count("_reduce_scatter_base" if shard else "allreduce") >= 2


def _on_the_host() -> int:
    """The process groups that ranks with GPUs, of which this model has no use, have made."""
    with (
        mock.patch.object(groups, "built_for", lambda: "cuda"),
        mock.patch.object(operations, "built_for", lambda: "cuda"),
        mock.patch.object(groups, "TorchGroup", side_effect=AssertionError("a process group is made")),
        joined(),
    ):
        weight = torch.nn.Parameter(torch.ones(3))
        for shard in (None, "optimizer"):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), [("weight", weight)], shard=shard)
            (weight.sum() * hvd.rank()).backward()
            optimizer.step()
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [3.0] * 3
        assert hvd.allgather(torch.ones(1)).tolist() == [1.0] * 3
        assert hvd.SyncBatchNorm(4).train()(torch.ones(2, 4)).shape == (2, 4)
        return len(groups._groups)


@pytest.mark.ranks
def test_tensors_of_the_cpu_never_use_a_process_group_unless_it_is_requested() -> None:
    assert run_ranks(3, _on_the_host) == [0, 0, 0]
