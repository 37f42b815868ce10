"""What hvd.track() costs in a step: steps that log nothing, an allreduce of three numbers a step, and hvd.track().

    hvdrun -np 2 python -m benchmarks.tracking

All three train one small network on the same batches, in turns, round after round. A window of hvd.track() is 50 steps;
rank 0 writes CSV and TensorBoard files in a folder that is removed. The time of a call of log() is shown beside it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

import hvdkit.torch as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.report import summarise
from hvdkit.tools.bench.timing import Turn, interleave

_NOTHING, _ALLREDUCE, _TRACK = "nothing is logged", "an allreduce a step", "hvd.track()"
_AIM = 1.02
_KEYS = ("loss", "accuracy", "norm")


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=9)
    parser.add_argument("--steps", type=positive_int, default=200, help="of a round")
    parser.add_argument("--width", type=positive_int, default=256, help="of the network's layers")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    calls_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(hvd.broadcast_object(folder))
        with hvd.track(csv=place / "run.csv", tensorboard=place / "board") as tracker:

            def track(values: Mapping[str, torch.Tensor]) -> None:
                began = time.perf_counter()
                tracker.log(values, samples=32)
                calls_s.append(time.perf_counter() - began)

            logs: dict[str, Callable[[Mapping[str, torch.Tensor]], object]] = {
                _NOTHING: lambda values: None,
                _ALLREDUCE: lambda values: hvd.allreduce(torch.stack(list(values.values())), name="logged").tolist(),
                _TRACK: track,
            }
            turns: dict[str, Turn] = {name: partial(_steps, log, options.width) for name, log in logs.items()}
            for turn in turns.values():
                turn(20)
            times = interleave(turns, dict.fromkeys(turns, options.steps), options.rounds)
    rows = []
    for name, figures in summarise(times, _NOTHING).items():
        met = figures.ratio <= _AIM if name == _TRACK else None
        aim = f"at most x{_AIM}" if name == _TRACK else ""
        rows.append(Row("step", name, figures.median_s, figures.ratio, _NOTHING, aim, met))
    ordered = sorted(calls_s)
    rows.append(Row("a call of log()", "median", ordered[len(ordered) // 2]))
    rows.append(Row("a call of log()", "99th percentile", ordered[len(ordered) * 99 // 100]))
    rows.append(Row("a call of log()", "mean", sum(ordered) / len(ordered)))
    finish(rows, hvd.describe(), options.json, first=hvd.rank() == 0)


def _steps(log: Callable[[Mapping[str, torch.Tensor]], object], width: int, count: int) -> list[float]:
    """So many steps of a new network; the seconds of each."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    inputs = torch.randn(32, width)
    times = []
    for _ in range(count):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        log(dict.fromkeys(_KEYS, loss.detach()))
        times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
