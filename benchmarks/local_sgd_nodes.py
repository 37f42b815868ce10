"""DiLoCo between two hosts at 1 Gbit/s: its step beside the step without communication, and the synchronous one.

    sudo python -m benchmarks.local_sgd_nodes

The hosts are network namespaces of this machine, as in benchmarks.nodes, with one rank each that computes with one
thread. Every way of training takes its turn for a period of 50 steps, which is what is timed, divided by 50; medians
over periods of all turns and jobs, ratios within a turn. The slowest rank counts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.nodes import MLP, hosts
from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int

EVERY, AIM = 50, 1.05
ALONE = "no communication"
_TURNS = 4

Times = dict[str, list[float]]  # by way of training, seconds a step of each period


def main() -> None:
    """Measure, and print the table."""
    if len(sys.argv) == 3 and sys.argv[1] == "rank":
        run_rank(Path(sys.argv[2]))
        return
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=2, help="jobs")
    options = parser.parse_args()
    times: Times = {}
    with hosts(2, rate="1gbit") as (lab, folder):
        from cluster.lab import environment

        out = folder / "times.json"
        command = [sys.executable, "-m", "hvdkit.launch", "-np", "2", "-H", ",".join(f"{name}:1" for name in lab.names)]
        command += [sys.executable, "-m", "benchmarks.local_sgd_nodes", "rank", str(out)]
        for _ in range(options.rounds):
            done = lab.run("node1", command, env=environment(OMP_NUM_THREADS="1"), timeout=400)
            if done.returncode:
                raise RuntimeError(f"the job ended with {done.returncode}:\n{done.stderr[-2000:]}")
            for way, found in json.loads(out.read_text()).items():
                times.setdefault(way, []).extend(found)
    rows = []
    for way, found in times.items():
        ratio = statistics.median(one / alone for one, alone in zip(found, times[ALONE], strict=True))
        aim = f"at most x{AIM:.2f}" if way.startswith("DiLoCo") else ""
        median = statistics.median(found)
        rows.append(Row(f"{MLP}, 2 hosts, 1 Gbit/s", way, median, ratio, ALONE, aim, ratio <= AIM if aim else None))
    finish(rows, "two network namespaces of this machine, one rank each", options.json)


def run_rank(out: Path) -> None:
    """Take turns on this host; rank 0 writes the times."""
    import torch

    import hvdkit.torch as hvd
    from hvdkit.tools.bench.models import CPU_MODELS, make_step

    hvd.init()
    torch.set_num_threads(1)
    work = next(one for one in CPU_MODELS if one.name == MLP)
    half = hvd.Compression.fp16
    ways: dict[str, Any] = {
        ALONE: lambda optimizer, model: optimizer,
        "DiLoCo": lambda optimizer, model: hvd.DiLoCo(optimizer, every=EVERY),
        "DiLoCo, fp16": lambda optimizer, model: hvd.DiLoCo(optimizer, every=EVERY, compression=half),
        "DiLoCo, fp16, 4 fragments, overlap 10": lambda optimizer, model: hvd.DiLoCo(
            optimizer, every=EVERY, compression=half, fragments=4, overlap=10
        ),
        "DiLoCo, Int8, 4 fragments, overlap 10": lambda optimizer, model: hvd.DiLoCo(
            optimizer, every=EVERY, compression=hvd.Compression.Int8(), fragments=4, overlap=10
        ),
        "LocalSGD, every 8, fp16": lambda optimizer, model: hvd.LocalSGD(optimizer, every=8, compression=half),
        "synchronous": lambda optimizer, model: hvd.DistributedOptimizer(optimizer, model.named_parameters()),
    }
    steps = {
        name: make_step(work, lambda model, optimizer, wrap=wrap: (model, wrap(optimizer, model)))  # type: ignore[misc]
        for name, wrap in ways.items()
    }
    times: Times = {name: [] for name in steps}
    for turn in range(-1, _TURNS):
        for name, step in steps.items():
            # A way whose every step communicates needs no whole period.
            count = 10 if name == "synchronous" else EVERY
            hvd.barrier()
            began = time.perf_counter()
            for _ in range(count):
                step()
            taken = (time.perf_counter() - began) / count
            slowest = max(hvd.allgather_object(taken))
            if turn >= 0:
                times[name].append(slowest)
    if hvd.rank() == 0:
        out.write_text(json.dumps(times))
    hvd.shutdown()


if __name__ == "__main__":
    main()
