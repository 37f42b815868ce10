"""A whole training step, peers side by side: no communication, hvdkit, torch DDP on Gloo, and with Horovod two more.

    hvdrun -np 2 python -m benchmarks.step_time
    hvdrun -np gpu python -m benchmarks.step_time --device cuda

What `hvdkit bench step` measures, with Horovod as a peer, beside its aims: every rank trains the same model with each
peer in turn, a few steps at a time, round after round. The ranks begin each step together, and the slower one's time
counts. Medians over all rounds, and ratios to the step without communication, each taken within its round.

On GPUs DDP is on NCCL, steps follow each other without a pause, and Horovod is a peer if it is built with NCCL. This
has not been run yet.
"""

from __future__ import annotations

import functools
from typing import Any

import hvdkit.torch as hvd
from benchmarks.horovod_job import HorovodJob, joined_with_horovod
from benchmarks.rows import Row, build_parser, finish
from hvdkit.tools.bench.gpus import find_clock
from hvdkit.tools.bench.models import Model
from hvdkit.tools.bench.plan import CPU, DEVICES, NO_COMMUNICATION, OURS, STEPS
from hvdkit.tools.bench.report import summarise
from hvdkit.tools.bench.step import Step, StepPeers, find_models, make_step
from hvdkit.tools.bench.timing import Turn, interleave, time_each, time_in_a_row

AIMS = {"MLP, 8 x 1024x1024": 1.05, "small conv net": 1.05, "101 small layers": 1.25}
#: On a GPU, of one rank.
_GPU_AIM = 1.01


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="threads that each rank computes with")
    parser.add_argument("--only", nargs="*", default=(), help="models whose name contains one of these")
    parser.add_argument("--device", choices=DEVICES, default=CPU)
    options = parser.parse_args()
    with joined_with_horovod(options.threads, options.device) as (job, notes):
        where, rows = " ".join([hvd.describe() + ".", *notes]), []
        for model in find_models(options.only, options.device):
            peers = StepPeers(model, device=options.device)
            turns = {**peers.turns, **_make_horovod_peers(model, options.device, job)}
            times = interleave(turns, dict.fromkeys(turns, STEPS), options.rounds)
            for peer, figures in summarise(times, NO_COMMUNICATION).items():
                told, met = judge(model.name, peer, figures.ratio)
                rows.append(Row(model.name, peer, figures.median_s, figures.ratio, NO_COMMUNICATION, told, met))
        finish(rows, where, options.json, first=hvd.rank() == 0)


def judge(model: str, peer: str, ratio: float) -> tuple[str, bool | None]:
    """The aim for a peer in words, and whether it is met. ratio: of its step to the one without communication."""
    if peer != OURS or (model not in AIMS and hvd.size() > 1):
        return "", None
    aim = AIMS.get(model, _GPU_AIM)
    return f"at most x{aim:.2f}", ratio <= aim


def _make_horovod_peers(model: Model, device: str, job: HorovodJob | None) -> dict[str, Turn]:
    """The turns of Horovod's ranks, warmed up; collective."""
    turns: dict[str, Turn] = {}
    if job is not None:
        for name, function in (("hvdkit on Horovod", "time_on_horovod"), ("Horovod", "time_horovod")):
            call = functools.partial(job.call, f"benchmarks.step_time:{function}", model.name, device)
            turns[name] = functools.partial(_call, call)
            turns[name](3)
    return turns


def _call(call: Any, steps: int) -> list[float]:
    return list(call(steps))


def time_horovod(name: str, device: str, steps: int) -> list[float]:
    """Seconds of each step, on a GPU their average; called in a rank of Horovod. name: of the model."""
    return _time(_horovod_step(name, device, False), device, steps)


def time_on_horovod(name: str, device: str, steps: int) -> list[float]:
    """The same with hvdkit's optimizer on Horovod's core."""
    return _time(_horovod_step(name, device, True), device, steps)


def _time(step: Step, device: str, steps: int) -> list[float]:
    return (time_each if device == CPU else time_in_a_row)(step, _meet, steps, find_clock(device))


@functools.cache
def _horovod_step(name: str, device: str, ours: bool) -> Step:
    """A step on Horovod's core, with hvdkit's optimizer or with Horovod's own."""
    import horovod.torch as horovod
    import torch

    if device != CPU:
        torch.cuda.set_device(horovod.local_rank() % torch.cuda.device_count())

    if ours:
        hvd.init(engine="horovod")  # the core that is running already
    wrap = hvd.DistributedOptimizer if ours else horovod.DistributedOptimizer
    return make_step(
        next(model for model in find_models((), device) if model.name == name),
        lambda module, optimizer: (module, wrap(optimizer, module.named_parameters())),
        device,
    )


def _meet() -> None:
    """Begin together: Horovod's own barrier lets ranks go up to a cycle apart."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    main()
