"""Ranks that save a training on one mesh and go on with it on another; arguments: JSON, see main()."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from parallel_model import make_model, make_optimizer, read_batches
from parallel_training import build, step

import hvdkit.torch as hvd
from hvdkit import parallel
from hvdkit.errors import CheckpointError


def main(sizes: dict[str, Any], directory: str, first: int, last: int, sharded: bool) -> None:
    """Train from the checkpoint, if there is one, from step `first` to `last`, and save."""
    torch.set_num_threads(1)
    mesh = parallel.Mesh(**sizes)
    model, optimizer = build(mesh, 16, sharded=sharded)
    values = parallel.load(directory, model, optimizer)
    assert (values is None) == (first == 0)
    assert values is None or values == {"step": first}
    for windows in read_batches(last, 16)[first:]:
        loss = step(model, optimizer, windows, mesh, 0.0, loss_cut=False)
        if hvd.rank() == 0:
            print("loss", loss)
    parallel.save(directory, model, optimizer, step=last)
    if mesh.pp == 1:
        other = parallel.shard(make_model(layers=3))
        before = [parameter.detach().clone() for parameter in other.parameters()]
        try:
            parallel.load(directory, other, make_optimizer(other.parameters()))
        except CheckpointError as error:
            message = str(error)
        assert "another model" in message
        assert "layers.3." in message
        for old, new in zip(before, other.parameters(), strict=True):
            assert torch.equal(old.full_tensor(), new.full_tensor())  # type: ignore[attr-defined]


main(**json.loads(sys.argv[1]))
