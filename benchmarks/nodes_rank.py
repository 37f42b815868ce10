"""A rank of benchmarks.nodes, on a host of its own; started by that, not by hand.

    python -m benchmarks.nodes_rank KIND WORK STEPS OUT

KIND: "hvdkit", which has torch's DDP, the wire and the step without communication beside it, or "horovod".
Rank 0 writes {"peer": [milliseconds of each step, ...]} to OUT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hvdkit.tools.bench.models import CPU_MODELS, Model, Step, Wrap, make_step

_TURNS = 2  # of all peers of a job, one after another
_MESSAGE = 60_000


def _hvdkit(work: Model, folder: Path) -> dict[str, Step]:
    import hvdkit.torch as hvd

    hvd.init()
    store = folder / f"store-{os.getppid() if hvd.rank() == 0 else 0}"
    path = hvd.broadcast_object(str(store))
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=hvd.rank(), world_size=hvd.size())
    nbytes = sum(one.numel() for one in work.make().parameters()) * 4

    def wrap(**options: Any) -> Wrap:
        return lambda model, optimizer: (
            model,
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options),
        )

    steps: dict[str, Step] = {
        "no communication": make_step(work, lambda model, optimizer: (model, optimizer)),
        "hvdkit": make_step(work, wrap()),
        "hvdkit fp16": make_step(work, wrap(compression=hvd.Compression.fp16)),
        "DDP (Gloo)": make_step(work, lambda model, optimizer: (nn.parallel.DistributedDataParallel(model), optimizer)),
        "wire": lambda: _exchange(nbytes * 2 * (hvd.size() - 1) // hvd.size()),
        "round trip": _round_trip,
    }
    return steps


def _exchange(nbytes: int) -> None:
    """Send so many bytes to the next rank while as many come from the one before."""
    from mpi4py import MPI

    comm, sent, received = MPI.COMM_WORLD, np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    requests = []
    for at in range(0, nbytes, _MESSAGE):
        requests.append(comm.Irecv(received[at : at + _MESSAGE], (comm.rank - 1) % comm.size))
        requests.append(comm.Isend(sent[at : at + _MESSAGE], (comm.rank + 1) % comm.size))
    MPI.Request.Waitall(requests)


def _round_trip() -> None:
    for _ in range(2):
        _exchange(1)


def _horovod(work: Model) -> dict[str, Step]:
    import horovod.torch as horovod

    horovod.init()

    def wrap(compression: Any) -> Wrap:
        return lambda model, optimizer: (
            model,
            horovod.DistributedOptimizer(optimizer, model.named_parameters(), compression),
        )

    return {
        "Horovod": make_step(work, wrap(horovod.Compression.none)),
        "Horovod fp16": make_step(work, wrap(horovod.Compression.fp16)),
    }


def main() -> None:
    """Measure what sys.argv says."""
    kind, name, count, out = sys.argv[1:]
    torch.set_num_threads(1)
    work = next(one for one in CPU_MODELS if one.name == name)
    steps = _hvdkit(work, Path(out).parent) if kind == "hvdkit" else _horovod(work)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    times: dict[str, list[float]] = {peer: [] for peer in steps}
    for turn in range(-1, _TURNS):
        for peer, step in steps.items():
            for _ in range(int(count) if turn >= 0 else 2):
                comm.Barrier()
                began = time.perf_counter()
                step()
                slowest = comm.allreduce(1000 * (time.perf_counter() - began), MPI.MAX)
                if turn >= 0:
                    times[peer].append(slowest)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(times))
    if kind == "hvdkit":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
