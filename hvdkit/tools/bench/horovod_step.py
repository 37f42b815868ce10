"""Training steps of Horovod, in ranks of its own, for the comparison in `hvdkit bench step`."""

from __future__ import annotations

import functools
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.tools.bench.gpus import find_clock
from hvdkit.tools.bench.horovod_job import HorovodJob
from hvdkit.tools.bench.models import WARM_UP, Model, Step, find_models, make_step
from hvdkit.tools.bench.report import CPU, HOROVOD
from hvdkit.tools.bench.timing import Turn, time_each, time_in_a_row

#: hvdkit's optimizer in a process that runs Horovod's core.
ON_HOROVOD = "hvdkit on Horovod"


def make_turns(model: Model, device: str, job: HorovodJob | None, *, ours: bool = False) -> dict[str, Turn]:
    """Make the turns of Horovod's ranks, warmed up; none without a job. Collective. ours: ON_HOROVOD too."""
    turns: dict[str, Turn] = {}
    if job is not None:
        for name in (ON_HOROVOD, HOROVOD) if ours else (HOROVOD,):
            turns[name] = functools.partial(_call, job, model.name, device, name == ON_HOROVOD)
            turns[name](WARM_UP)
    return turns


def _call(job: HorovodJob, name: str, device: str, ours: bool, steps: int) -> list[float]:
    return list(job.call(f"{__name__}:time_steps", name, device, ours, steps))


def time_steps(name: str, device: str, ours: bool, steps: int) -> list[float]:
    """Return the seconds of each step, on a GPU their average; runs in a rank of Horovod.

    name: name of the model.
    device: "cpu" or "cuda".
    ours: use hvdkit's optimizer on Horovod's core?
    steps: number of steps.
    """
    take_turn = time_each if device == CPU else time_in_a_row
    return take_turn(_make_step(name, device, ours), _meet, steps, find_clock(device))


@functools.cache
def _make_step(name: str, device: str, ours: bool) -> Step:
    """Make a step on Horovod's core, with hvdkit's optimizer or with Horovod's."""
    import horovod.torch as horovod

    if device != CPU:
        torch.cuda.set_device(horovod.local_rank() % torch.cuda.device_count())
    if ours:
        hvd.init(engine="horovod")  # the core that is already running
    wrap: Any = hvd.DistributedOptimizer if ours else horovod.DistributedOptimizer
    return make_step(
        next(model for model in find_models((), device) if model.name == name),
        lambda module, optimizer: (module, wrap(optimizer, module.named_parameters())),
        device,
    )


def _meet() -> None:
    """Start a step together: Horovod's own barrier lets ranks continue up to a cycle apart."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
