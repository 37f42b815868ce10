"""Compare the time of steps with the settings that the autotuner has found and with the defaults.

    python -m benchmarks.autotune              two ranks of this machine
    sudo python -m benchmarks.autotune --hosts     also hosts in network namespaces, with slow links between them

A first job finds the settings. Then jobs with these settings and jobs with the defaults run in turns. A time is the
median over the steps of rank 0, and contains its wait for the slowest rank.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.nodes import hosts
from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.models import CPU_MODELS, make_step
from hvdkit.tools.bench.report import describe_machine

_SEARCHED = 220
_WARM_UP = 10
_JOB_S = 180.0
#: Takes a command and environment variables. Runs the command on the host on which hvdrun is started, in this process's
#: environment with the variables added. Raises an exception if the command fails.
Run = Callable[[list[str], Mapping[str, str]], object]


def main() -> None:
    """Measure, and print the table; with --rank be a rank of a job."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--steps", type=positive_int, default=60, help="of a job")
    parser.add_argument("--hosts", action="store_true", help="also hosts over slow links; needs root")
    parser.add_argument("--rank", nargs=3, metavar=("MODEL", "STEPS", "FILE"), help="internal: a rank of a job")
    options = parser.parse_args()
    if options.rank:
        _train(options.rank[0], int(options.rank[1]), Path(options.rank[2]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in (CPU_MODELS[0].name, CPU_MODELS[2].name):
            place = "2 ranks of a host"
            rows += _measure(model, place, ["-np", "2"], _run_here, Path(folder), options.rounds, options.steps)
    if options.hosts:
        for model, count, rate, delay_ms in (
            (CPU_MODELS[0].name, 2, "1gbit", 0.0),
            (CPU_MODELS[2].name, 3, "1gbit", 1.0),
        ):
            with hosts(count, rate=rate, delay_ms=delay_ms) as (lab, shared):
                from cluster.lab import environment

                def run_there(command: list[str], variables: Mapping[str, str]) -> None:
                    done = lab.run("node1", command, env=environment(**variables), timeout=_JOB_S)
                    if done.returncode:
                        raise RuntimeError(done.stderr[-2000:])

                place = f"{count} hosts, {rate}, {delay_ms:g} ms"
                where = ["-np", str(count), "-H", ",".join(f"{name}:1" for name in lab.names)]
                rows += _measure(model, place, where, run_there, shared, options.rounds, max(5, options.steps // 4))
    finish(rows, ", ".join(f"{key} {value}" for key, value in describe_machine().items()), options.json)


def _run_here(command: list[str], variables: Mapping[str, str]) -> None:
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=_JOB_S, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


def _measure(
    model: str, place: str, where: Sequence[str], run: Run, folder: Path, rounds: int, steps: int
) -> list[Row]:
    """Search, then measure in turns. where: options of hvdrun. folder: that all hosts see."""
    tuned, out = folder / "tuned.json", folder / "out.json"
    tuned.unlink(missing_ok=True)

    def run_job(count: int, *arguments: str) -> list[float]:
        rank = [sys.executable, "-m", "benchmarks.autotune", "--rank", model, str(count), str(out)]
        run([sys.executable, "-m", "hvdkit.launch", *where, *arguments, *rank], {"OMP_NUM_THREADS": "1"})
        found: list[float] = json.loads(out.read_text())
        return found

    run_job(_SEARCHED, "--autotune-save", str(tuned))
    times: dict[str, list[float]] = {"default": [], "tuned": []}
    ratios = []
    for _ in range(rounds):
        default, found = run_job(steps), run_job(steps, "--tuned", str(tuned))
        times["default"] += default
        times["tuned"] += found
        ratios.append(statistics.median(found) / statistics.median(default))
    work = f"{model}, {place}"
    return [
        Row(work, "default settings", statistics.median(times["default"])),
        Row(work, "settings of the autotuner", statistics.median(times["tuned"]), statistics.median(ratios), "default"),
    ]


def _train(name: str, steps: int, out: Path) -> None:
    import hvdkit.torch as hvd

    hvd.init()
    torch.manual_seed(1)
    model = next(each for each in CPU_MODELS if each.name == name)
    step = make_step(model, lambda net, optimizer: (net, hvd.DistributedOptimizer(optimizer, net.named_parameters())))
    seconds = []
    for number in range(_WARM_UP + steps):
        began_s = time.perf_counter()
        step()
        if number >= _WARM_UP:
            seconds.append(time.perf_counter() - began_s)
    if hvd.rank() == 0:
        out.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
