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


def v_shaped(schedule: str, dtype: torch.dtype) -> tuple[list[float], str]:
    """Losses of a chain of two linear layers for each rank of a pipeline, and their dtype."""
    try:
        torch.set_num_threads(1)
        hvd.init()
        mesh = parallel.Mesh(pp=hvd.size())
        model = parallel.pipeline(
            chain_of(2 * mesh.pp, dtype),
            loss=torch.nn.functional.mse_loss,
            example=torch.zeros(2, 4, dtype=dtype),
            microbatches=6,
            schedule=schedule,
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for seed in range(3):
            inputs, targets = rows_of(seed, dtype)
            optimizer.zero_grad()
            loss = model.step(inputs, targets)
            optimizer.step()
            losses.append(float(loss))
        return losses, str(loss.dtype)
    finally:
        hvd.shutdown()


def chain_of(layers: int, dtype: torch.dtype) -> torch.nn.Sequential:
    """Linear layers, the same on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers))).to(dtype)


def rows_of(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Inputs and targets of a step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(12, 4, generator=generator).to(dtype) for _ in range(2)]


def measured(case: str) -> str:
    """What a rank is told of a model that is no chain."""
    try:
        hvd.init()
        mesh = parallel.Mesh(pp=hvd.size())
        with pytest.raises(ParallelError) as error:
            parallel.pipeline(BrokenChain(case), loss=loss_of, example=torch.zeros(2, 4), microbatches=3, mesh=mesh)
        return str(error.value)
    finally:
        hvd.shutdown()


class BrokenChain(torch.nn.Sequential):
    """Three layers; case: what is wrong with the model."""

    def __init__(self, case: str) -> None:
        super().__init__(*(torch.nn.Linear(4, 4) for _ in range(3)))
        self.case = case

    def forward(self, inputs: torch.Tensor) -> Any:
        outputs = super().forward(inputs)  # type: ignore[no-untyped-call]
        if self.case == "tuple":
            return outputs, inputs
        if self.case == "dtype":
            return outputs.double()
        if self.case == "shape":
            return outputs[None]
        if self.case == "model":
            raise RuntimeError("no good")
        return outputs


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
