"""Peak memory of a rank that trains the MLP with Adam: under hvdkit, and in the same training without communication.

    hvdrun -np 2 python -m benchmarks.memory

Every rank starts a process of its own that trains without communication, and keeps it to the end: what a library takes
is divided by the processes that have it loaded, so both trainings need the same number of them. "Proportional" is the
largest such share of memory (PSS) seen after a backward pass or a step; "resident" is the peak of all pages that the
process sees, the other ranks' buckets among them. The table shows the rank with most, and what is over: more than the
framework, the parameters, their gradients, Adam's state and the rank's own buckets. The framework is what a process has
that has trained one number with Adam, since torch loads a third of itself when the first optimizer is made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.models import CPU_MODELS

_AIM_MB = 150


class Memory(NamedTuple):
    """A process's memory, in MB (10^6 bytes)."""

    proportional: float
    resident: float


class Training(NamedTuple):
    """What a training took, in MB. tensors: parameters, gradients and optimizer state."""

    peak: Memory
    gradients: float
    tensors: float


def _read_mb(file: str, field: str) -> float:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024 / 1e6


def _now() -> Memory:
    return Memory(_read_mb("smaps_rollup", "Pss"), _read_mb("status", "VmRSS"))


def _load_framework() -> Memory:
    number = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([number])
    number.sum().backward()
    optimizer.step()
    return _now()


def _megabytes(tensors: Iterable[Tensor | None]) -> float:
    return sum(one.nbytes for one in tensors if one is not None) / 1e6


def train(wrap: Callable[[nn.Module, torch.optim.Optimizer], Any], steps: int) -> Training:
    """Train, and look at the memory after each backward pass and each step."""
    work = CPU_MODELS[0]
    model = work.make()
    optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=1e-4))
    inputs, targets = work.batch()
    largest = 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        largest = max(largest, _now().proportional)
        optimizer.step()
        largest = max(largest, _now().proportional)
    parameters = list(model.parameters())
    gradients = _megabytes(one.grad for one in parameters)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    peak = Memory(largest, _read_mb("status", "VmHWM"))
    return Training(peak, gradients, _megabytes(parameters) + gradients + _megabytes(states))


def _train_with_hvdkit(steps: int) -> tuple[Training, float]:
    """The training, and the megabytes of the rank's buckets."""
    # Only here: the memory that these imports take is hvdkit's.
    import hvdkit.torch as hvd
    from hvdkit.engine import runtime as engine

    hvd.init()
    done = train(lambda model, optimizer: hvd.DistributedOptimizer(optimizer, model.named_parameters()), steps)
    config = engine.runtime("the benchmark").config
    return done, min(done.gradients, config.fusion_bytes * config.buckets_in_flight / 1e6)


def list_rows(framework: Memory, alone: Training, ours: Training, buckets: float) -> list[Row]:
    """A row for each part of the memory, of which only what is over has an aim. buckets: of the rank, in MB."""
    fixed = Memory(*(part + ours.tensors for part in framework))
    over = Memory(*(peak - part - buckets for peak, part in zip(ours.peak, fixed, strict=True)))
    parts = {
        "torch": framework,
        "parameters, gradients, Adam's state": Memory(ours.tensors, ours.tensors),
        "buckets of the rank": Memory(buckets, buckets),
        "peak without communication": alone.peak,
        "peak under hvdkit": ours.peak,
        "over, without communication": Memory(*(peak - part for peak, part in zip(alone.peak, fixed, strict=True))),
        "over, under hvdkit": over,
    }
    rows = []
    for part, memory in parts.items():
        for kind, mb in memory._asdict().items():
            told, met = (f"at most {_AIM_MB} MB", mb <= _AIM_MB) if memory is over else ("", None)
            rows.append(Row(f"memory, {part}", kind, None, mb=mb, aim=told, met=met))
    return rows


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--steps", type=positive_int, default=20)
    parser.add_argument("--threads", type=positive_int, default=1, help="threads that each rank computes with")
    parser.add_argument("--alone", action="store_true", help="only the training without communication; ranks start it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.alone:
        print(json.dumps([_load_framework(), train(lambda model, optimizer: optimizer, options.steps)]), flush=True)
        sys.stdin.read()  # until the rank has trained as well
        return
    command = [sys.executable, "-m", "benchmarks.memory", "--alone"]
    command += ["--steps", str(options.steps), "--threads", str(options.threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        framework, (peak, *sums) = json.loads(process.stdout.readline())
        alone = Training(Memory(*peak), *sums)
        ours, buckets = _train_with_hvdkit(options.steps)
        process.communicate()
    import hvdkit.torch as hvd

    where, measured = hvd.describe(), hvd.allgather_object((Memory(*framework), alone, ours, buckets))
    rows = list_rows(*max(measured, key=lambda one: one[2].peak.proportional))
    finish(rows, where, options.json, first=hvd.rank() == 0)


if __name__ == "__main__":
    main()
