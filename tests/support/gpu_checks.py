"""What ranks on GPUs do for tests/gpu/test_gpu.py, with torch. Each function is a rank's part of a job of its own."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_training import Training, make_step, start
from torch import nn

import hvdkit.torch as hvd
from hvdkit.engine.observe.recording import HEAD, RECORDER, STAMPS, clock
from hvdkit.errors import HvdkitError
from hvdkit.transport.gpu_driver import Driver

_WARM_UP = 5
_WAITS = ("synchronize_event",)


def count_waits(device: str, **options: Any) -> dict[str, int]:
    """Take steps in which torch raises for every wait of its own; returns hvdkit's waits, by function and thread.

    options: of the optimizer.
    """
    place = start(device)
    _, step = make_step(Training(), place, **options)
    for _ in range(_WARM_UP):
        step()
    with _counted_waits() as waits, _no_waits_of_torch(place):
        for _ in range(3):
            step()
    _settle(place)
    hvd.shutdown()
    return dict(waits)


def record_steps(device: str) -> list[Any]:
    """Record three steps; returns hvdkit's waits in them, and stages of buckets that are not in order or in time."""
    place = start(device)
    _, step = make_step(Training(), place)
    for _ in range(_WARM_UP):
        step()
    RECORDER.start()
    step()  # after it the clock of the GPU is set
    _settle(place)
    began = clock()
    with _counted_waits() as waits, _no_waits_of_torch(place):
        for _ in range(3):
            step()
    _settle(place)
    ended = clock()
    RECORDER.stop()
    (rounds,) = RECORDER.take()
    hvd.shutdown()
    rows = np.stack([np.frombuffer(row) for row in rounds.rows])[-3:]
    stamps = rows[:, len(HEAD) :].reshape(3, -1, len(STAMPS))
    slack_s = 0.001  # of the two clocks
    wrong = (np.diff(stamps, axis=2) < 0).any(axis=2) | (stamps[..., 0] < began - slack_s)
    wrong |= stamps[..., -1] > ended + slack_s
    return [dict(waits), stamps[wrong].tolist()]


def count_copies(device: str) -> dict[str, int]:
    """Profile a step; returns the number of copies by direction, as "DtoH", and of NCCL's kernels."""
    place = start(device)
    _, step = make_step(Training(), place)
    for _ in range(_WARM_UP):
        step()
    _settle(place)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if place.type == "cuda" else []
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        _settle(place)
    names = [event.name for event in profile.events()]
    copies = Counter(name.split()[1] for name in names if name.startswith("Memcpy "))
    hvd.shutdown()
    return {**copies, "nccl": sum(name.startswith("nccl") for name in names)}


def reduce_by_name(device: str) -> list[str]:
    """Call every named collective with several dtypes; returns what was wrong."""
    place = start(device)
    rank, size, wrong = hvd.rank(), hvd.size(), list[str]()

    def check(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        same = got.device == place and got.dtype == expected.dtype and torch.equal(got.cpu(), expected)
        if not same:
            wrong.append(f"{what}: {got} on {got.device}, expected {expected} on {place}")

    total, everyone = size * (size + 1) // 2, range(size)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        name = str(dtype)
        mine = torch.full((size, 3), rank + 1, dtype=dtype, device=place)
        whole = torch.full((size, 3), total, dtype=dtype)
        check(f"allreduce of {name}", hvd.allreduce(mine, name=f"sum.{name}", op=hvd.Sum), whole)
        check(
            f"the largest of {name}", hvd.allreduce(mine, name=f"max.{name}", op=hvd.Max), torch.full_like(whole, size)
        )
        in_place = mine.clone()
        assert hvd.allreduce_(in_place, name=f"in place.{name}", op=hvd.Sum) is in_place
        check(f"allreduce_ of {name}", in_place, whole)
        handles = [hvd.allreduce_async(mine, name=f"{number}.{name}", op=hvd.Sum) for number in range(20)]
        for number, handle in enumerate(handles):
            check(f"allreduce_async {number} of {name}", hvd.synchronize(handle), whole)
        for result in hvd.grouped_allreduce([mine, mine[:1]], name=f"group.{name}", op=hvd.Sum):
            check(f"grouped_allreduce of {name}", result, whole[: len(result)])
        rows = torch.cat([torch.full((each + 1, 3), each + 1, dtype=dtype) for each in everyone])
        check(f"allgather of {name}", hvd.allgather(mine[:1].repeat(rank + 1, 1), name=f"gather.{name}"), rows)
        last = torch.full((size, 3), size, dtype=dtype)
        check(f"broadcast of {name}", hvd.broadcast(mine, size - 1, name=f"broadcast.{name}"), last)
        received, splits = hvd.alltoall(mine, torch.ones(size, dtype=torch.int32), name=f"alltoall.{name}")
        each_row = torch.tensor([[each + 1] * 3 for each in everyone], dtype=dtype)
        check(f"alltoall of {name}", received, each_row)
        if splits.tolist() != [1] * size:
            wrong.append(f"alltoall of {name} received {splits} rows")
        check(f"reducescatter of {name}", hvd.reducescatter(mine, name=f"scatter.{name}", op=hvd.Sum), whole[:1])
    average = hvd.allreduce(torch.full((3,), float(rank), device=place), name="average")
    check("average", average, torch.full((3,), (size - 1) / 2))
    needs = torch.ones(3, device=place, requires_grad=True)
    hvd.allreduce(needs, name="gradient", op=hvd.Sum).sum().backward()
    assert needs.grad is not None
    check("the gradient of allreduce", needs.grad, torch.full((3,), float(size)))
    alone = hvd.add_process_set([rank for rank in everyone if rank == 0])
    if rank == 0:
        check("allreduce in a process set", hvd.allreduce(mine, name="alone", process_set=alone), mine.cpu())
    _compare_batch_norm(place, wrong)
    hvd.shutdown()
    return wrong


def _compare_batch_norm(place: torch.device, wrong: list[str]) -> None:
    """SyncBatchNorm on the ranks does what BatchNorm1d does with the whole batch."""
    torch.manual_seed(3)
    whole = torch.randn(4 * hvd.size(), 6)
    mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    synchronised, alone = hvd.SyncBatchNorm(6).to(place), nn.BatchNorm1d(6)
    got, expected = synchronised(whole[mine].to(place)).cpu(), alone(whole)[mine]
    if not torch.allclose(got, expected, atol=1e-5):
        wrong.append(f"SyncBatchNorm: {got}, expected {expected}")


def capture(device: str) -> dict[str, Any]:
    """Capture a step in a CUDA graph; returns how a replay differs from a plain step, or how hvdkit refuses it."""
    place = start(device)
    model, step = make_step(Training(options={"lr": 0.05}), place)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except (HvdkitError, RuntimeError) as error:
        refusal = _find_refusal(error)
        if refusal is None:
            raise
        return {"refused": str(refusal)}
    before, replayed = _copy(model), _after(model, graph.replay)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    plain = _after(model, step)
    result = {"replay": _largest(replayed, plain), "step": _largest(before, plain)}
    hvd.shutdown()
    return result


def _after(model: nn.Module, step: Callable[[], object]) -> list[torch.Tensor]:
    step()
    return _copy(model)


def _copy(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _largest(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(ones, others, strict=True))


def _find_refusal(error: BaseException | None) -> HvdkitError | None:
    """hvdkit's error, where the end of the capture has raised another one after it."""
    while error is not None and not isinstance(error, HvdkitError):
        error = error.__context__
    return error


def die_in_allreduce(device: str, marker: str) -> None:
    """Reduce large tensors until rank 1 is killed, which leaves the file `marker` before. Ends with the job."""
    place = start(device)
    tensor = torch.ones(16 * 2**20, device=place)
    for number in range(10_000):
        if hvd.rank() == 1 and number == 5:
            threading.Timer(0.05, _die, (marker,)).start()
        hvd.allreduce_(tensor, name="endless", op=hvd.Average)


def die_in_backward(device: str, marker: str) -> None:
    """As die_in_allreduce, in the steps of a training."""
    place = start(device)
    _, step = make_step(Training(), place)
    for number in range(1_000_000):
        if hvd.rank() == 1 and number == 5:
            threading.Timer(0.05, _die, (marker,)).start()
        step()


def _die(marker: str) -> None:
    Path(marker).touch()
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _counted_waits() -> Iterator[Counter[str]]:
    """What hvdkit asks CUDA's driver to wait for."""
    counter, original = Counter[str](), Driver.call

    def call(driver: Driver, function: str, *arguments: object, where: str = "") -> None:
        if function in _WAITS:
            counter[f"{function} in {threading.current_thread().name}"] += 1
        original(driver, function, *arguments, where=where)

    with mock.patch.object(Driver, "call", call):
        yield counter


@contextmanager
def _no_waits_of_torch(place: torch.device) -> Iterator[None]:
    _settle(place)
    if place.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if place.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def _settle(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize()
