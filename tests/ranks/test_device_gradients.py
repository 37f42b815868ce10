"""Gradients reduced by process groups of torch: by Gloo on the CPU, with the code that reduces those of GPUs."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import test_torch_join
import torch
from device_world import TORCH, train_on_devices
from ranks import RanksFailedError, run_ranks
from torch_world import Case, assert_alike, joined, train, train_here

import hvdkit.torch as hvd
from hvdkit.engine import runtime
from hvdkit.engine.observe.recording import HEAD, RECORDER, STAMPS
from hvdkit.engine.planned.plan import TensorSpec, plan_buckets
from hvdkit.errors import HorovodInternalError, RankLostError, TransportError
from hvdkit.torch.device.accelerator import Accelerator
from hvdkit.torch.device.buckets import TorchBuckets
from hvdkit.torch.device.calls import Call
from hvdkit.torch.device.group import TorchGroup, describe_slow
from hvdkit.torch.device.groups import DeviceSettings, open_group
from hvdkit.torch.device.masks import DeviceMasks
from hvdkit.torch.source import TorchSource
from hvdkit.torch.tensors import TensorBuffer

pytestmark = [pytest.mark.ranks, pytest.mark.native("Horovod's core reduces tensors by itself")]

ADAM = {"lr": 0.01}


def _check(case: Case, size: int, tolerance: float, **more: Any) -> None:
    assert_alike(run_ranks(size, train_on_devices, case, **more), train_here(case, size), tolerance)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-10)])
def test_ranks_train_as_one_process(dtype: str, tolerance: float) -> None:
    _check(Case("Adam", ADAM, dtype=dtype), 3, tolerance)


def test_buckets_of_any_size_accumulation_and_clipping() -> None:
    _check(Case(passes=3, clip=0.3), 2, 1e-10, settings={"fusion_bytes": 256})


@pytest.mark.slow
def test_mixed_precision_skips_the_step_of_an_infinite_loss_on_all_ranks() -> None:
    _check(Case("Adam", ADAM, dtype="float32", steps=4, autocast=True, clip=1.0, infinite_at=1), 2, 5e-3)


def in_a_set(case: Case) -> Any:
    """Ranks 0 and 2 train together, rank 1 by itself; each as rank and size of its set."""
    with joined(**TORCH, fusion_bytes=256):
        mine = [hvd.add_process_set(ranks) for ranks in ([0, 2], [1])][hvd.rank() % 2]
        model, plain = case.make()
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), process_set=mine)
        return train(case, model, optimizer, rank=mine.rank(), of=mine.size(), size=2)


@pytest.mark.slow
def test_process_sets_train_by_themselves() -> None:
    first, alone, third = run_ranks(3, in_a_set, Case())
    expected = train_here(Case(), 2)
    assert_alike([first, third], expected, 1e-10)
    assert_alike([alone], expected, 1e-10)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_keeps_its_shard_in_device_memory(passes: int, shard: str) -> None:
    case = Case("Adam", ADAM, clip=0.1, passes=passes)
    results = run_ranks(3, _train_sharded, case, settings={"fusion_bytes": 256}, shard=shard)
    assert_alike([weights for weights, _, _ in results], train_here(case, 3), 1e-10)
    for _, scattered, gathered in results:
        assert gathered >= 2 * case.steps, "several buckets a step"
        assert scattered == (gathered if shard == "gradients" else 0)


def _train_sharded(case: Case, **more: Any) -> tuple[Any, int, int]:
    """The weights, and how many buckets were reduce-scattered and gathered."""
    with (
        mock.patch.object(
            TorchBuckets, "reduce_scatter", autospec=True, side_effect=TorchBuckets.reduce_scatter
        ) as one,
        mock.patch.object(TorchBuckets, "all_gather", autospec=True, side_effect=TorchBuckets.all_gather) as two,
    ):
        return train_on_devices(case, **more), one.call_count, two.call_count


def recorded(case: Case) -> tuple[list[int], bool]:
    """The numbers of the recorded rounds, and whether all stages of buckets are in order."""
    RECORDER.start()
    try:
        train_on_devices(case, settings={"fusion_bytes": 256})
    finally:
        RECORDER.stop()
    (rounds,) = RECORDER.take()
    rows = np.stack([np.frombuffer(row) for row in rounds.rows])
    stamps = rows[:, len(HEAD) :].reshape(len(rows), -1, len(STAMPS))
    in_order = bool((np.diff(stamps, axis=2) >= 0).all()) and stamps.shape[1] > 1
    return rows[:, 0].astype(int).tolist(), in_order


def test_a_recording_has_the_times_of_the_device() -> None:
    case = Case()
    assert run_ranks(2, recorded, case) == [(list(range(case.steps)), True)] * 2


@pytest.mark.parametrize("compression, tolerance", [("fp16", 5e-3), ("bf16", 5e-2)])
def test_compression_costs_no_more_than_its_bits(compression: str, tolerance: float) -> None:
    _check(Case(dtype="float32"), 3, tolerance, compression=compression)


def join(batches: list[int]) -> Any:
    with joined(**TORCH, fusion_bytes=2048):
        return test_torch_join._train(batches, 2, 1)


def test_a_joined_rank_counts_as_zeros() -> None:
    batches = [4, 1, 2]
    test_torch_join._check(run_ranks(3, join, batches), batches)


def join_two() -> tuple[list[float], list[float]]:
    """Two optimizers, whose steps the ranks take in turn; rank 1 takes one step of each, rank 0 takes three."""
    with joined(**TORCH, fusion_bytes=16):
        models = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
        optimizers = []
        for number, model in enumerate(models):
            torch.nn.init.zeros_(model.weight)
            named = [(f"{number}.{name}", one) for name, one in model.named_parameters()]
            optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named))
        for _ in range(1 if hvd.rank() else 3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
        hvd.join()
        first, second = (model.weight.flatten().tolist() for model in models)
        return first, second


def test_a_joined_rank_takes_part_in_the_steps_of_two_optimizers() -> None:
    trained, _ = run_ranks(2, join_two)
    assert trained == ([-2.0] * 64, [-2.0] * 64)  # one average of two ranks, and two with zeros


class Branches(torch.nn.Module):
    """A part that all ranks use, one that rank 0 uses, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.first, self.nobody = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))

    def loss(self, *, first: bool) -> torch.Tensor:
        """A sum whose gradients are 2 for each part."""
        return 2 * (self.all.sum() + (self.first.sum() if first else 0.0))


def unused(static: bool) -> tuple[list[float], list[float], bool, str]:
    with joined(**TORCH):
        model, rank, error = Branches(), hvd.rank(), ""
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), static_graph=static
        )
        for _ in range(3):
            optimizer.zero_grad()
            model.loss(first=rank == 0).backward()
        assert model.all.grad is not None and model.first.grad is not None
        gradients = model.all.grad.tolist(), model.first.grad.tolist(), model.nobody.grad is None
        if static:
            optimizer.zero_grad()
            try:
                model.loss(first=rank == 1).backward()
            except HorovodInternalError as failure:
                error = str(failure)
        return *gradients, error


@pytest.mark.parametrize("static", [False, True])
def test_parameters_that_not_all_ranks_use(static: bool) -> None:
    for every, first, nobody, error in run_ranks(2, unused, static, fresh=static):
        assert every == [2.0] * 3 and first == [1.0] * 3 and nobody
        assert ("static_graph=True" in error) == static


@pytest.mark.parametrize("static", [False, True])
def test_a_static_graph_reads_the_masks_in_the_first_round_only(static: bool) -> None:
    tensors = [TensorSpec(name, 3, "float64") for name in "ab"]
    buckets = plan_buckets(tensors, 1 << 20, ["none"] * 2)
    memory = [TensorBuffer(torch.zeros(bucket.count, dtype=torch.float64), "float64") for bucket in buckets]
    masks = DeviceMasks(buckets, memory, static=static)
    found = []
    for others in (0.0, 1.0):  # whether another rank uses what this one does not, in the first round and the second
        masks.mark(0, frozenset({1}))
        memory[0].array[buckets[0].data_count :] += others
        found.append(set(masks.globally_unused(0)))
    assert found == [{1}, {1} if static else set()]


def a_rank_dies() -> None:
    """The last rank is killed in a backward pass, when some of its buckets have started."""
    with joined(**TORCH, fusion_bytes=256):
        model, optimizer = _wrapped()
        _step(model, optimizer)
        if hvd.rank() == 2:
            next(model.parameters()).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        began = time.monotonic()
        with pytest.raises(RankLostError) as lost:
            while True:
                _step(model, optimizer)
        seconds = time.monotonic() - began
        with pytest.raises(RankLostError) as later:
            _step(model, optimizer)
        raise RuntimeError(f"after {seconds:.0f} s: {lost.value} LATER {later.value}")


def test_a_killed_rank_ends_the_wait_of_the_others() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(3, a_rank_dies, fresh=True)
    for rank in (0, 1):
        text = failed.value.tracebacks[rank]
        assert re.search(r"after \d s: Rank 2 .*GLOO on rank \d on .*, CPU were ended.* LATER Rank 2 ", text), text


def _step(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 12)).square().sum().backward()
    optimizer.step()


def _wrapped() -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())


def fail_in_begin(after: int, ranks: Collection[int]) -> Any:
    """Within, the call of the backend number `after` from now on fails on some ranks."""
    calls = itertools.count()

    def begin(group: TorchGroup, call: Call) -> Any:
        def fail(*_: object) -> None:
            raise RuntimeError("unhandled system error\nat some place")

        fails = next(calls) == after and hvd.rank() in ranks
        return plain(group, call._replace(method=fail) if fails else call)

    plain = TorchGroup.begin
    return mock.patch.object(TorchGroup, "begin", begin)


def a_bucket_fails() -> list[str]:
    """What steps say in which, and after which, the backend fails in the second bucket."""
    said = []
    with joined(**TORCH, fusion_bytes=256):
        model, optimizer = _wrapped()
        for _ in range(5):
            _step(model, optimizer)
        with fail_in_begin(1, range(2)):
            for call in (_step, _step, lambda *_: optimizer.step()):
                with pytest.raises(TransportError) as failed:
                    call(model, optimizer)
                said.append(str(failed.value))
    return said


def test_a_failure_of_the_backend_is_raised_by_this_step_and_later_ones() -> None:
    for rank, said in enumerate(run_ranks(2, a_bucket_fails)):
        where = f"rank {rank} on {socket.gethostname()}, CPU"
        assert "GLOO failed in an allreduce of optimizer" in said[0], said[0]
        assert f"on {where}: unhandled system error." in said[0]
        assert f"The operations of GLOO on {where} were ended" in said[0] and set(said) == {said[0]}


def one_rank_fails() -> str:
    with joined(**TORCH):
        model, optimizer = _wrapped()
        _step(model, optimizer)
        with fail_in_begin(0, [0]), pytest.raises(TransportError) as failed:
            while True:
                _step(model, optimizer)
        runtime.shutdown(idle=False)  # as elastic.run() does then
    return f"{type(failed.value).__name__}: {failed.value}"


@pytest.mark.slow
def test_the_others_hear_of_a_failure_when_the_rank_leaves() -> None:
    first, *others = run_ranks(3, one_rank_fails, fresh=True)
    assert first.startswith("TransportError: GLOO failed in an allreduce")
    assert all(other.startswith("RankLostError") for other in others)


def in_order() -> list[tuple[str, int]]:
    """The groups of operations, as this rank begins them: two optimizers in one backward, and named ones."""
    issued: list[tuple[str, int]] = []

    def begin(group: TorchGroup, call: Call) -> Any:
        issued.append((group.name, group.size))
        return plain(group, call)

    plain = TorchGroup.begin
    with joined(**TORCH, fusion_bytes=256), mock.patch.object(TorchGroup, "begin", begin):
        pair = hvd.add_process_set([0, 2])
        (one, first), (two, second) = _wrapped(), _wrapped()
        norm = hvd.SyncBatchNorm(12).train()
        for _ in range(4):
            for optimizer in (first, second):
                optimizer.zero_grad()
            inputs = norm(torch.randn(4, 12, requires_grad=True))
            if hvd.rank() != 1:
                hvd.allreduce(torch.ones(3), process_set=pair)
            (one(inputs).square().sum() + two(inputs).square().sum()).backward()
            first.step()
            hvd.allreduce(torch.ones(3))
            second.step()
    return issued


def test_operations_of_several_groups_are_issued_in_one_order() -> None:
    first, second, third = run_ranks(3, in_order)
    assert first == third and second == [each for each in first if each[1] == 3]
    assert len(set(first)) == 4 and len({each for each in first if each[0].startswith("optimizer")}) == 2


def test_a_capture_in_a_cuda_graph_is_refused_with_the_reason() -> None:
    with (
        mock.patch.object(torch.cuda, "current_stream", lambda _: "a stream"),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", side_effect=[False, True]),
    ):
        accelerator = Accelerator(torch.device("cuda", 0))
        assert accelerator.current_stream() == "a stream"
        with pytest.raises(HorovodInternalError, match=r"while a CUDA graph is being captured.*synchronize"):
            accelerator.current_stream()


def test_memory_of_a_released_gradient_is_used_again_after_the_copy_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[torch.device, list[Any]]] = []
    monkeypatch.setattr(Accelerator, "record_use", lambda self, tensors: used.append((self.device, tensors)))
    source = TorchSource([("w", torch.nn.Parameter(torch.ones(2)))], {})
    device = torch.device("cuda", 3)
    gradient = SimpleNamespace(is_cpu=False, device=device)
    source.parameters = [SimpleNamespace(grad=gradient)]  # type: ignore[list-item]
    source.release(0)
    assert used == [(device, [gradient])] and source.parameters[0].grad is None


def test_slow_operations_name_those_beside_them() -> None:
    group, other = (mock.Mock(spec=TorchGroup, where="rank 0 on node1, GPU 0") for _ in range(2))
    group.name, other.name = "optimizer.1", "the common process group"
    assert "different orders" not in describe_slow(group, [], 61.2)
    text = describe_slow(group, [other], 61.2)
    assert "of optimizer.1 on rank 0 on node1, GPU 0 have been under way for 61 s" in text
    assert "Those of the common process group are under way on this GPU too" in text and "different orders" in text


def refuse() -> str:
    with joined(**TORCH), pytest.raises(TransportError) as caught:
        device = torch.device("cpu") if hvd.rank() else None
        open_group(runtime.runtime("the test").transport, device, DeviceSettings("torch"))
    return str(caught.value)


def test_a_rank_whose_tensors_are_on_several_devices_is_refused_on_all_ranks() -> None:
    for message in run_ranks(3, refuse):
        assert "device_transport=torch" in message and "rank 0 " in message and "not all on one GPU" in message
