"""What the ranks of tests/test_parallel.py do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

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


def build(
    mesh: parallel.Mesh,
    batch: int,
    *,
    plan: Mapping[str, str] = PLAN,
    schedule: str = "1F1B",
    recompute: bool = False,
    sharded: bool = True,
) -> tuple[Any, Any]:
    """Model and optimizer on this rank."""
    model: Any = make_model()
    if mesh.pp > 1:
        example = torch.zeros(batch // mesh.dp // 4, 16, dtype=torch.long)
        model = parallel.pipeline(model, loss=loss_of, example=example, microbatches=4, schedule=schedule, parts=PARTS)
    parallel.tensor_parallel(model, plan)
    if recompute:
        parallel.recompute(model)
    if sharded and mesh.dp > 1:
        parallel.shard(model)
    optimizer = make_optimizer(model.parameters())
    if not sharded and mesh.dp > 1:
        passes = 4 if mesh.pp > 1 else 1
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


if __name__ == "__main__":
    import json
    import sys

    for options in json.loads(sys.argv[1]):
        losses = train(**options)
        if hvd.rank() == 0:
            print("losses", json.dumps(losses))
