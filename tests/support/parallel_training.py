"""What the ranks of tests/ranks/test_parallel.py do."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from parallel_model import (
    PARTS,
    PLAN,
    SEQUENCE,
    loss_of,
    make_model,
    make_optimizer,
    read_batches,
)

import hvdkit.torch as hvd
from hvdkit import parallel
from hvdkit.errors import CheckpointError, ParallelError
from hvdkit.profiling.mesh_steps import MeshSteps


def build(
    mesh: parallel.Mesh,
    batch: int,
    *,
    plan: Mapping[str, str] = PLAN,
    schedule: str = "1F1B",
    microbatches: int = 2,
    recompute: bool = False,
    sharded: bool = True,
) -> tuple[Any, Any]:
    """Model and optimizer on this rank."""
    model: Any = make_model()
    if mesh.pp > 1:
        model = parallel.pipeline(
            model,
            loss=loss_of,
            example=torch.zeros(batch // mesh.dp // microbatches, 16, dtype=torch.long),
            microbatches=microbatches,
            schedule=schedule,
            parts=PARTS,
        )
    parallel.tensor_parallel(model, plan)
    if recompute:
        parallel.recompute(model)
    if sharded and mesh.dp > 1:
        parallel.shard(model)
    optimizer = make_optimizer(model.parameters())
    if not sharded and mesh.dp > 1:
        passes = microbatches if mesh.pp > 1 else 1
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            process_set=mesh.group("dp"),
            backward_passes_per_step=passes,
        )
    return model, optimizer


def step(model: Any, optimizer: Any, windows: torch.Tensor, mesh: parallel.Mesh, clip: float, loss_cut: bool) -> float:
    """One step on this replica's part of the batch; returns the mean loss of all replicas."""
    own = windows.chunk(mesh.dp)[mesh.coordinates["dp"]]
    optimizer.zero_grad()
    with parallel.loss_parallel() if loss_cut and mesh.tp > 1 else contextlib.nullcontext():
        if isinstance(model, parallel.Pipeline):
            loss = model.step(own[:, :-1], own[:, 1:])
        else:
            loss = loss_of(model(own[:, :-1]), own[:, 1:])
            loss.backward()
    if clip:
        parallel.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    loss = loss.detach()
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return float(hvd.allreduce(loss, name="loss"))


def train(
    sizes: dict[str, Any], steps: int, batch: int, *, clip: float = 0.0, sequence: bool = False, **options: Any
) -> list[float]:
    """The losses of a training on a mesh."""
    torch.set_num_threads(1)
    mesh = parallel.Mesh(**sizes)
    model, optimizer = build(mesh, batch, plan=SEQUENCE if sequence else PLAN, **options)
    return [step(model, optimizer, windows, mesh, clip, sequence) for windows in read_batches(steps, batch)]


def train_all(trainings: list[dict[str, Any]]) -> list[list[float]]:
    """The losses of several trainings, one after the other."""
    try:
        return [train(**options) for options in trainings]
    finally:
        hvd.shutdown()


SLOW_S = 0.02


def profiled() -> MeshSteps | None:
    """What hvd.profile() finds of steps whose second stage sleeps in each forward pass."""
    torch.set_num_threads(1)
    try:
        mesh = parallel.Mesh(pp=2)
        model, optimizer = build(mesh, 16)
        if mesh.coordinates["pp"]:
            model.stages[0].register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))
        batches = read_batches(12, 16)
        step(model, optimizer, batches.pop(), mesh, 0.0, False)
        with hvd.profile() as seen:
            for windows in batches:
                step(model, optimizer, windows, mesh, 0.5, False)
    finally:
        hvd.shutdown()
    return seen.mesh


#: What refusals() finds, in its order.
REFUSED = ["zero bubble over shards", "hooks beside zero bubble", *["hvd.checkpoint of parts"] * 4]


def refusals() -> list[str]:
    """Try what would train wrongly, or lose parts of a model; returns what was refused. On 4 ranks."""
    try:
        return list(_refusals())
    finally:
        hvd.shutdown()


def _refusals() -> Iterator[str]:
    torch.set_num_threads(1)
    mesh = parallel.Mesh(dp=2, pp=2)
    pipe, _ = build(mesh, 16, schedule="ZBVZeroBubble", microbatches=4, sharded=False)
    with pytest.raises(ParallelError, match=r"shard\(\).*ZBVZeroBubble.*DualPipeV"):
        parallel.shard(pipe)
    yield "zero bubble over shards"
    codes = torch.zeros(8, 17, dtype=torch.long)
    with pytest.raises(ParallelError, match=r"DistributedOptimizer.*1F1B"):
        pipe.step(codes[:, :-1], codes[:, 1:])
    yield "hooks beside zero bubble"
    pipe, optimizer = build(mesh, 16)
    stage, own = build(mesh, 16, sharded=False)
    for thing in (pipe, optimizer, stage.stages[0], own):
        with pytest.raises(CheckpointError, match=r"'thing'.*parallel\.save"):
            hvd.checkpoint.save("nowhere", thing=thing)
        yield "hvd.checkpoint of parts"


if __name__ == "__main__":
    found = train_all(json.loads(sys.argv[1]))
    if os.environ["RANK"] == "0":
        print("losses", json.dumps(found))
