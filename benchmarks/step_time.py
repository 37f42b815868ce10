"""A whole training step, peers side by side: no communication, hvdkit, torch DDP on Gloo, and with Horovod two more.

    hvdrun -np 2 python -m benchmarks.step_time

Every rank trains the same model with each peer in turn, a few steps at a time, round after round, so that all of them
meet the same machine. The ranks begin each step together, and the slower one's time counts. The table gives medians
over all rounds, and ratios to the step without communication, each taken within its round. Horovod's ranks are
processes of their own, which stand still while the others have their turn.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hvdkit.torch as hvd
from benchmarks.gloo import join_gloo
from benchmarks.horovod_job import HorovodJob, why_not
from benchmarks.models import WORKS, Work
from benchmarks.summary import summarise

Wrap = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]
Step = Callable[[], None]
Turn = Callable[[int], list[float]]  # so many steps; the milliseconds that each took on this rank


def _make_step(work: Work, wrap: Wrap) -> Step:
    torch.manual_seed(0)
    model, optimizer = wrap(plain := work.make(), torch.optim.SGD(plain.parameters(), lr=1e-4))
    inputs, targets = work.batch()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def _time(step: Step, steps: int, barrier: Step) -> list[float]:
    times = []
    for _ in range(steps):
        barrier()
        began = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - began))
    return times


def _beside(wrap: Wrap) -> Callable[[Work], Turn]:
    """A peer that lives in these processes."""

    def make(work: Work) -> Turn:
        step = _make_step(work, wrap)
        return lambda steps: _time(step, steps, hvd.barrier)

    return make


def _peers(job: HorovodJob | None) -> dict[str, Callable[[Work], Turn]]:
    peers = {
        "no communication": _beside(lambda model, optimizer: (model, optimizer)),
        "hvdkit": _beside(
            lambda model, optimizer: (model, hvd.DistributedOptimizer(optimizer, model.named_parameters()))
        ),
        "DDP (Gloo)": _beside(lambda model, optimizer: (nn.parallel.DistributedDataParallel(model), optimizer)),
    }
    if job is not None:
        for name, function in (("hvdkit on Horovod", "time_on_horovod"), ("Horovod", "time_horovod")):
            peers[name] = functools.partial(_in_job, job, f"benchmarks.step_time:{function}")
    return peers


def _in_job(job: HorovodJob, function: str, work: Work) -> Turn:
    """A peer that lives in Horovod's ranks."""
    return lambda steps: list(job.call(function, work.name, steps))


@functools.cache
def _horovod_step(name: str, ours: bool) -> Step:
    """A step on Horovod's core, with hvdkit's optimizer or with Horovod's own."""
    import horovod.torch as horovod

    if ours:
        hvd.init(engine="horovod")  # the core that is running already
    wrap = hvd.DistributedOptimizer if ours else horovod.DistributedOptimizer
    return _make_step(
        next(work for work in WORKS if work.name == name),
        lambda model, optimizer: (model, wrap(optimizer, model.named_parameters())),
    )


def time_horovod(name: str, steps: int) -> list[float]:
    """Milliseconds of each step; called in a rank of Horovod. name: of the work."""
    return _time(_horovod_step(name, False), steps, _meet)


def time_on_horovod(name: str, steps: int) -> list[float]:
    """The same with hvdkit's optimizer on Horovod's core."""
    return _time(_horovod_step(name, True), steps, _meet)


def _meet() -> None:
    """Begin together: Horovod's own barrier lets ranks go up to a cycle apart."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


def measure(work: Work, peers: dict[str, Callable[[Work], Turn]], *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds a step of every peer in every round: the slowest rank counts, and the median of `steps` is taken."""
    turns = {name: make(work) for name, make in peers.items()}
    for turn in turns.values():
        turn(3)
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            times[name].append(float(hvd.allreduce(torch.tensor(turn(steps)), op=hvd.Max).median()))
    return times


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=15, help="steps in a round")
    parser.add_argument("--threads", type=int, default=1, help="threads that each rank computes with")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    hvd.init()
    join_gloo()
    missing = why_not()
    job = None if missing else HorovodJob(options.threads)
    where, peers, results = hvd.describe(), _peers(job), {}
    if hvd.rank() == 0:
        print(f"{where}. {missing}\n\n| model | {' | '.join(peers)} | aim |\n|{'---|' * (len(peers) + 2)}")
    for work in WORKS:
        if options.only not in work.name:
            continue
        results[work.name] = summary = summarise(measure(work, peers, rounds=options.rounds, steps=options.steps))
        cells = [f"{ms:.1f} ms" + (f" x{ratio:.2f}" if n else "") for n, (ms, ratio) in enumerate(summary.values())]
        if hvd.rank() == 0:
            print(f"| {work.name} | " + " | ".join(cells) + f" | x{work.aim:.2f} |", flush=True)
    if options.json and hvd.rank() == 0:
        options.json.write_text(json.dumps({"where": where, "results": results}, indent=1))
    if job is not None:
        job.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
