"""What is particular to Horovod's core as the engine: what it refuses, how it says so, its own timeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engines import require_horovod
from ranks import run_ranks
from torch import nn

import hvdkit.torch as hvd
from hvdkit.config import Config
from hvdkit.engine import provider
from hvdkit.errors import ConfigError, HorovodInternalError, MissingDependencyError, TransportError
from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.buckets import BucketSpec
from hvdkit_horovod import choice
from hvdkit_horovod.binding import Call, check_device
from hvdkit_horovod.choice import choose_binding
from hvdkit_horovod.start import variables_for
from hvdkit_horovod.transport import HorovodBuckets

DTYPES = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]
REFUSED = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.bool, torch.bfloat16, torch.complex64]


def _on(size: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    require_horovod()
    return run_ranks(size, _joined, body, args, **options)


def _joined(body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    hvd.init(engine="horovod")
    try:
        return body(*args)
    finally:
        hvd.shutdown()


def _reduce(dtype: torch.dtype) -> None:
    size, rank = hvd.size(), hvd.rank()
    mine = torch.tensor([[rank + 1, 2, 3], [4, 5 * rank, 6]]).to(dtype)
    everyone = torch.stack([torch.tensor([[r + 1, 2, 3], [4, 5 * r, 6]]) for r in range(size)]).double()
    found = {
        hvd.Sum: everyone.sum(0),
        hvd.Min: everyone.amin(0),
        hvd.Max: everyone.amax(0),
        hvd.Product: everyone.prod(0),
        hvd.Average: everyone.mean(0) if dtype.is_floating_point else everyone.mean(0).trunc(),
    }
    for op, expected in found.items():
        torch.testing.assert_close(hvd.allreduce(mine, op=op).double(), expected, rtol=1e-3, atol=0)
    grouped = hvd.grouped_allreduce([mine, mine[:, :1].contiguous()], op=hvd.Sum, prescale_factor=2.0)
    torch.testing.assert_close(grouped[1].double(), 2 * everyone.sum(0)[:, :1])
    assert hvd.alltoall(mine.repeat(size, 1)).shape == (2 * size, 3)


def test_a_single_phase_of_a_bucket_is_refused() -> None:
    binding = Mock()
    call = Call("allreduce", "buckets", None)
    buckets = HorovodBuckets(binding, call, [BucketSpec("float32", 3)], None, NumpyArithmetic())
    for phase in (buckets.reduce_scatter, buckets.all_gather):
        with pytest.raises(TransportError, match="Horovod's core cannot do reduce_scatter"):
            phase(0)
    assert not buckets.busy and not binding.start.called


@pytest.mark.horovod_core
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_reduces_what_it_has_an_addition_for(size: int, dtype: torch.dtype) -> None:
    _on(size, _reduce, dtype)


def _refused(dtype: torch.dtype) -> tuple[str, list[Any]]:
    with pytest.raises(TypeError) as caught:
        hvd.allreduce(torch.ones(3, dtype=dtype), op=hvd.Sum)
    moved = hvd.broadcast(torch.tensor([hvd.rank(), 0, 1]).to(dtype), root_rank=1)
    return str(caught.value), hvd.allgather(moved).double().tolist()


@pytest.mark.horovod_core
@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_what_it_cannot_add_is_refused_with_the_way_round_and_moved_all_the_same(dtype: torch.dtype) -> None:
    for message, moved in _on(2, _refused, dtype):
        assert str(dtype).removeprefix("torch.") in message and "HVDKIT_ENGINE=native" in message
        assert moved == [1, 0, 1, 1, 0, 1]


def _bf16_on_the_wire() -> str:
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=hvd.Compression.bf16
    )
    with pytest.raises(TypeError) as caught:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return str(caught.value)


@pytest.mark.horovod_core
def test_bfloat16_on_the_wire_is_refused_not_imitated() -> None:
    for message in _on(2, _bf16_on_the_wire):
        assert "the gradient of" in message and "Compression.fp16" in message


def _disagree() -> str:
    with pytest.raises(HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(hvd.rank() + 1), name="weights")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size(), "and it goes on"
    return str(caught.value)


@pytest.mark.horovod_core
def test_a_disagreement_is_told_on_all_ranks_with_the_operations_name() -> None:
    for message in _on(2, _disagree):
        assert message.startswith("allreduce.weights: Horovod: Mismatched ALLREDUCE tensor shapes")


def _answers() -> list[Any]:
    return [hvd.mpi_enabled(), hvd.mpi_built(), hvd.nccl_built(), "horovod (MPI) transport" in hvd.describe()]


@pytest.mark.horovod_core
def test_it_answers_how_it_was_built() -> None:
    assert _on(2, _answers) == [[True, True, 0, True]] * 2


def _draw(path: str) -> None:
    hvd.shutdown()
    hvd.init(engine="horovod", timeline=path)
    hvd.allreduce(torch.ones(3), name="drawn")


@pytest.mark.horovod_core
def test_the_timeline_is_horovods_own(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    _on(2, _draw, str(path), fresh=True)
    text = path.read_text()
    events = json.loads(text if text.rstrip().endswith("]") else text.rstrip().rstrip(",") + "]")
    assert any("drawn" in str(event.get("args", "")) for event in events)


def test_settings_that_mean_the_same_are_told_to_it() -> None:
    told = variables_for(Config(stall_check_s=30, stall_shutdown_s=90, timeline="t.json"))
    assert told == {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90",
        "HOROVOD_TIMELINE": "t.json",
    }
    assert variables_for(Config(stall_check_s=0))["HOROVOD_STALL_CHECK_DISABLE"] == "1"


def test_a_transport_of_hvdkits_own_does_not_go_with_it() -> None:
    with pytest.raises(ConfigError, match="transport=mpi is for the native engine"):
        Config(engine="horovod", transport="mpi")


@pytest.mark.parametrize(
    ("wish", "launcher", "built", "framework", "chosen"),
    [
        ("auto", "openmpi", ["torch"], "torch", "native"),
        ("auto", "horovodrun", ["torch"], "torch", "horovod"),
        ("auto", "horovodrun", ["torch"], "tensorflow", "native"),
        ("auto", "horovodrun", ["torch"], "", "horovod"),
        ("auto", "horovodrun", [], "torch", "native"),
        ("native", "horovodrun", ["torch"], "torch", "native"),
        ("horovod", "none", [], "torch", "horovod"),
    ],
)
def test_which_engine(
    wish: str, launcher: str, built: list[str], framework: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "built_bindings", lambda: built)
    monkeypatch.setattr("hvdkit_horovod.provider.built_bindings", lambda: built)
    native = Mock()
    native.return_value.name = "native"
    found, why = provider.find_provider(wish, launcher, framework, native)
    assert found.name == chosen and why
    if wish == "auto" and launcher == "horovodrun" and not built:
        assert "Horovod is not installed" in why


def test_an_engine_without_its_package_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "entry_points", lambda **_: ())
    with pytest.raises(MissingDependencyError, match=r"pip install .* \./packages/horovod"):
        provider.find_provider("horovod", "none", "torch", Mock())
    assert "no package with another engine" in provider.find_provider("auto", "horovodrun", "torch", Mock())[1]


def test_a_missing_binding_is_told_with_its_cure() -> None:
    for built, framework in (([], "torch"), (["tensorflow"], "torch")):
        with pytest.raises(MissingDependencyError, match="hvdkit build-horovod"):
            choose_binding(framework, built)
    assert choose_binding("", ["tensorflow"]) == "tensorflow"


def test_a_gpu_is_refused_by_a_horovod_without_gpus() -> None:
    with pytest.raises(MissingDependencyError, match=r"tensor is on cuda:1.*hvdkit build-horovod --gpu-operations"):
        check_device("cuda:1", built=False)
    check_device("cuda:1", built=True)
    check_device("cpu", built=False)


def _reduce_elsewhere() -> str:
    with pytest.raises(MissingDependencyError) as error:
        hvd.allreduce(torch.zeros(3, device="meta"), name="elsewhere")
    return str(error.value)


@pytest.mark.horovod_core
def test_a_tensor_of_another_device_is_no_unknown_function() -> None:
    assert all(said.startswith("A tensor is on meta") for said in _on(2, _reduce_elsewhere))


def _shard() -> str:
    with pytest.raises(ValueError, match="shard") as caught:
        hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), shard="optimizer")
    return str(caught.value)


@pytest.mark.horovod_core
def test_a_sharded_optimizer_is_refused() -> None:
    for message in _on(2, _shard):
        assert "HVDKIT_ENGINE=native" in message
