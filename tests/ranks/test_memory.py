"""What training under hvdkit takes of memory, and that it gives back what it took."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch_world import joined

import hvdkit.torch as hvd

MB = 10**6
pytestmark = pytest.mark.ranks


def _read(file: str, field: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def _taken() -> int:
    """Bytes of this process, with its part of what it shares; without libraries, which others share as they come."""
    return _read("smaps_rollup", "Pss") - _read("smaps_rollup", "Pss_File")


def _held() -> dict[str, int]:
    """What a process can forget to give back."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "open files": len(os.listdir("/proc/self/fd")),
        "mappings of shared memory": sum("/hvdkit-" in line for line in maps),
        "files of shared memory": sum(f"hvdkit-{os.getpid()}-" in name for name in os.listdir("/dev/shm")),
        "threads": min(map(_count_threads, range(20))),
    }


def _count_threads(_: int) -> int:
    """How many the system has; one that has been joined is there for a moment longer."""
    time.sleep(0.005)
    return len(os.listdir("/proc/self/task"))


def _layers(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, next(model.parameters()).shape[1])).square().mean().backward()
    optimizer.step()


def _distributed(model: nn.Module) -> torch.optim.Optimizer:
    wrapped: torch.optim.Optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    return wrapped


def _over(transport: str) -> int:
    """The peak, less what was there before, parameters, gradients, Adam's state and one generation of buckets."""
    small = _layers(1, 8)
    _step(small, torch.optim.Adam(small.parameters()))  # torch loads the rest of itself
    before, peak = _taken(), 0
    with joined(transport):
        model = _layers(8, 1024)
        optimizer = _distributed(model)
        for _ in range(5):
            _step(model, optimizer)
            peak = max(peak, _taken())
    return peak - before - 5 * sum(one.nbytes for one in model.parameters())


@pytest.mark.parametrize("over", ["shared_memory", pytest.param("mpi", marks=pytest.mark.slow)])
def test_a_rank_takes_at_most_150_mb_beside_its_tensors_and_buckets(over: str) -> None:
    assert max(run_ranks(2, _over, over, fresh=True, timeout=90)) < 150 * MB


def _growth(transport: str, steps: int) -> int:
    with joined(transport):
        model = _layers(4, 64)
        optimizer = _distributed(model)
        for _ in range(20):
            _step(model, optimizer)
        before = _taken()
        for _ in range(steps):
            _step(model, optimizer)
        return _taken() - before


@pytest.mark.parametrize(
    "over",
    ["shared_memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpi", "hierarchical_round_robin"))],
)
def test_training_on_takes_no_more_memory(over: str) -> None:
    assert max(run_ranks(2, _growth, over, 200, timeout=60)) < 5 * MB


def _grow_and_leave(progress: str) -> None:
    hvd.init(progress=progress)
    model = _layers(4, 300)
    optimizer = _distributed(model)
    for _ in range(2):
        _step(model, optimizer)
        model.append(extra := nn.Linear(300, 300))
        optimizer.add_param_group({"params": list(extra.parameters())})
    hvd.allreduce(torch.ones(100_000))
    hvd.barrier()
    hvd.shutdown()


def _cycles(progress: str) -> tuple[dict[str, int], dict[str, int], int]:
    torch.set_num_threads(1)
    for _ in range(4):
        _grow_and_leave(progress)
    gc.collect()
    gc.disable()  # so that nothing waits for the collector
    before, taken = _held(), _taken()
    for _ in range(8):
        _grow_and_leave(progress)
    after, grown = _held(), _taken() - taken
    gc.enable()
    return before, after, grown


@pytest.mark.slow
@pytest.mark.parametrize("progress", ["inline", "thread"])
def test_joining_growing_and_leaving_again_and_again_leaves_nothing_behind(progress: str) -> None:
    for before, after, grown in run_ranks(2, _cycles, progress, timeout=60, fresh=True):
        assert before == after
        assert grown < 20 * MB  # a model left behind each time would be 70


def _replace(progress: str) -> tuple[dict[str, int], dict[str, int], int]:
    with joined(progress=progress):
        model = _layers(4, 300)
        optimizer = _distributed(model)
        _step(model, optimizer)
        gc.collect()
        before = _held()
        for _ in range(3):
            optimizer = _distributed(model)
            _step(model, optimizer)
        del optimizer
        deadline = time.monotonic() + 5  # a thread that was told to end lets its memory go when it does
        while gc.collect() or (time.monotonic() < deadline and any(_held()[what] > before[what] for what in before)):
            time.sleep(0.05)
        hooks: Any = next(model.parameters())._post_accumulate_grad_hooks
        return before, _held(), len(hooks)


@pytest.mark.slow
@pytest.mark.parametrize("progress", ["inline", "thread"])
def test_an_optimizer_that_is_thrown_away_goes_with_all_it_had(progress: str) -> None:
    for before, after, hooks in run_ranks(2, _replace, progress, timeout=60, fresh=True):
        assert all(after[what] <= count for what, count in before.items()), (before, after)
        assert hooks == 0
