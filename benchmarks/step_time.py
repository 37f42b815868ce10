"""A whole training step, peers side by side: no communication, hvdkit, torch DDP on Gloo, and Horovod if it is there.

    hvdrun -np 2 python -m benchmarks.step_time

Every rank trains the same model with each peer in turn, a few steps at a time, round after round, so that all of them
meet the same machine. The ranks begin each step together, and the slower one's time counts. The table gives medians
over all rounds, and ratios to the step without communication, each taken within its round.
"""

from __future__ import annotations

import argparse
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
from benchmarks.models import WORKS, Work
from benchmarks.summary import summarise

Step = Callable[[], None]


def _make_step(work: Work, wrap: Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]) -> Step:
    torch.manual_seed(0)
    model, optimizer = wrap(plain := work.make(), torch.optim.SGD(plain.parameters(), lr=1e-4))
    inputs, targets = work.batch()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def _peers() -> dict[str, Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]]:
    peers = {
        "no communication": lambda model, optimizer: (model, optimizer),
        "hvdkit": lambda model, optimizer: (model, hvd.DistributedOptimizer(optimizer, model.named_parameters())),
        "DDP (Gloo)": lambda model, optimizer: (nn.parallel.DistributedDataParallel(model), optimizer),
    }
    try:
        import horovod.torch as horovod
    except ImportError:
        return peers
    horovod.init()
    peers["Horovod"] = lambda model, optimizer: (
        model,
        horovod.DistributedOptimizer(optimizer, model.named_parameters()),
    )
    return peers


def _time(step: Step, steps: int) -> float:
    """Milliseconds a step: all ranks begin it together, the slowest one counts, and the median of `steps` is taken."""
    times = []
    for _ in range(steps):
        hvd.barrier()
        began = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - began))
    return float(hvd.allreduce(torch.tensor(times), op=hvd.Max).median())


def measure(work: Work, peers: dict[str, Any], *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds a step of every peer in every round."""
    made = {name: _make_step(work, wrap) for name, wrap in peers.items()}
    for step in made.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, step in made.items():
            times[name].append(_time(step, steps))
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
    where, peers, results = hvd.describe(), _peers(), {}
    if hvd.rank() == 0:
        print(f"{where}\n\n| model | {' | '.join(peers)} | aim |\n|{'---|' * (len(peers) + 2)}")
    for work in WORKS:
        if options.only not in work.name:
            continue
        results[work.name] = summary = summarise(measure(work, peers, rounds=options.rounds, steps=options.steps))
        cells = [f"{ms:.1f} ms" + (f" x{ratio:.2f}" if n else "") for n, (ms, ratio) in enumerate(summary.values())]
        if hvd.rank() == 0:
            print(f"| {work.name} | " + " | ".join(cells) + f" | x{work.aim:.2f} |", flush=True)
    if options.json and hvd.rank() == 0:
        options.json.write_text(json.dumps({"where": where, "results": results}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
