"""Ranks that save a training on one mesh and go on with it on another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_model import make_model, make_optimizer, read_batches
from parallel_training import build, step

import hvdkit.torch as hvd
from hvdkit import parallel
from hvdkit.errors import CheckpointError


def go_on(sizes: dict[str, Any], directory: str, first: int, last: int, sharded: bool) -> list[float]:
    """Train from the checkpoint, if there is one, from step `first` to `last`, and save; returns the losses."""
    try:
        torch.set_num_threads(1)
        mesh = parallel.Mesh(**sizes)
        model, optimizer = build(mesh, 16, sharded=sharded)
        values = parallel.load(directory, model, optimizer)
        assert values == (None if first == 0 else {"step": first})
        losses = [
            step(model, optimizer, windows, mesh, 0.0, loss_cut=False) for windows in read_batches(last, 16)[first:]
        ]
        parallel.save(directory, model, optimizer, step=last)
        if mesh.pp == 1:
            _refuse_another_model(directory)
    finally:
        hvd.shutdown()
    return losses


def _refuse_another_model(directory: str) -> None:
    other = parallel.shard(make_model(layers=3))
    fifo = Path(directory) / "__9_9.distcp"
    if hvd.rank() == 0:
        os.mkfifo(fifo)
    hvd.barrier()
    with pytest.raises(CheckpointError, match="it is a FIFO"):
        parallel.load(directory, other)
    if hvd.rank() == 0:
        fifo.unlink()
    before = [parameter.detach().clone() for parameter in other.parameters()]
    with pytest.raises(CheckpointError, match=r"another model.*layers\.2\."):
        parallel.load(directory, other, make_optimizer(other.parameters()))
    for old, new in zip(before, other.parameters(), strict=True):
        assert torch.equal(old.full_tensor(), new.full_tensor())  # type: ignore[attr-defined]
