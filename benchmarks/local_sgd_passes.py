"""One average of hvd.LocalSGD beside two shorter ways to average the same parameters: time, and memory of a rank.

    python -m benchmarks.local_sgd_passes

Two ranks of this machine, one thread each, `--millions` of float32 parameters in layers of a million. The ways:

    LocalSGD      what a step of hvd.LocalSGD does when an average is due: parameters to host buffers, less the shared
                  values, into buckets and out of them, added to the shared values, and back to the parameters
    two passes    parameters into the buckets of a plan and out of them, as gradients are: the least that buckets allow
    by parameter  one allreduce for each parameter, on a copy of it, and when all have ended the copies to the
                  parameters, as torchft.LocalSGD does

Times: the ways take turns in one job, ratios are medians of the ratios within a turn, the slower rank counts. Memory:
a job for each way. Standing is what a rank has after its averages beyond what it had with its parameters (proportional
set size, with what the allocator keeps); peak is by how much its resident memory grows at most, with all of the shared
memory. The results are in hvdkit/strategies/periodic.py, beside the reasons for the longest way.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int

LOCAL_SGD, TWO_PASSES, BY_PARAMETER = WAYS = "LocalSGD", "two passes", "by parameter"
_LAYER = 1000  # rows and columns, of which one is the bias


def main() -> None:
    """Start the jobs, and print the table."""
    if sys.argv[1:2] == ["rank"]:
        run_rank(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
        return
    parser = build_parser(__doc__)
    parser.add_argument("--millions", type=positive_int, default=10, help="of parameters")
    parser.add_argument("--turns", type=positive_int, default=40)
    options = parser.parse_args()
    work = f"{options.millions} million float32 parameters, 2 ranks"
    times = _run_job(options.millions, options.turns, WAYS)["seconds"]
    rows = []
    for way in WAYS:
        ratio = statistics.median(one / least for one, least in zip(times[way], times[TWO_PASSES], strict=True))
        rows.append(Row(f"{work}, an average", way, statistics.median(times[way]), ratio, TWO_PASSES))
    for way in WAYS:
        memory = _run_job(options.millions, 2, [way])["mb"]
        rows += [Row(f"{work}, {kind} memory", way, None, mb=memory[kind]) for kind in ("standing", "peak")]
    finish(rows, "two ranks of this machine in shared memory, one thread each", options.json)


def _run_job(millions: int, turns: int, ways: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "hvdkit.launch", "-np", "2", sys.executable, "-m", __spec__.name, "rank"]
        subprocess.run([*command, str(out), str(millions), str(turns), *ways], check=True, timeout=400)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def run_rank(out: Path, millions: int, turns: int, ways: Sequence[str]) -> None:
    """Average in turns on this rank; rank 0 writes seconds by way, and the memory of the job in 10^6 bytes."""
    import torch

    import hvdkit.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    models = [torch.nn.Sequential(*(torch.nn.Linear(_LAYER - 1, _LAYER) for _ in range(millions))) for _ in ways]
    before = _read_mb("smaps_rollup", "Pss"), _read_mb("status", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    averages = [_open(way, model) for way, model in zip(ways, models, strict=True)]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(-2, turns):
        for way, average in zip(ways, averages, strict=True):
            hvd.barrier()
            began = time.perf_counter()
            average()
            slower = max(hvd.allgather_object(time.perf_counter() - began))
            if turn >= 0:
                seconds[way].append(slower)
    hvd.barrier()
    grown = _read_mb("smaps_rollup", "Pss") - before[0], _read_mb("status", "VmHWM") - before[1]
    standing, peak = (max(each) for each in zip(*hvd.allgather_object(grown), strict=True))
    if hvd.rank() == 0:
        out.write_text(json.dumps({"seconds": seconds, "mb": {"standing": standing, "peak": peak}}))
    hvd.shutdown()


def _open(way: str, model: Any) -> Callable[[], None]:
    """Return a function that averages the parameters of the model over all ranks, in this way; collective."""
    import torch

    import hvdkit.torch as hvd

    if way == BY_PARAMETER:
        return lambda: _average_copies(list(model.parameters()))
    plain = torch.optim.SGD(model.parameters(), 0.0)
    optimizer: Any = (
        hvd.LocalSGD(plain, model=model, every=1)
        if way == LOCAL_SGD
        else hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=_make_two_passes())
    )
    optimizer.step()  # attaches the strategy; without gradients SGD changes nothing
    after_step: Callable[[], None] = optimizer._hvdkit.strategy.after_step
    return after_step


def _average_copies(parameters: Sequence[Any]) -> None:
    import torch

    import hvdkit.torch as hvd

    with torch.no_grad():
        copies = [parameter.detach().clone() for parameter in parameters]
        for handle in [hvd.allreduce_async_(copy, op=hvd.Average, name=str(at)) for at, copy in enumerate(copies)]:
            hvd.synchronize(handle)
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.copy_(copy)


def _make_two_passes() -> Any:
    from hvdkit.engine.api import AllReduce, Group, Parameters, Strategy

    class TwoPasses(Strategy):
        """Averages the parameters themselves after each step, by the buckets of AllReduce."""

        overlaps_backward = False

        def __init__(self) -> None:
            self._average, self._count = AllReduce(), 0

        def attach(self, parameters: Parameters, group: Group) -> None:
            """See Strategy.attach."""
            self._count = len(parameters.tensors)
            self._average.attach(dataclasses.replace(parameters, gradients=parameters.values, own=None), group)

        def after_step(self) -> None:
            """See Strategy.after_step."""
            for index in reversed(range(self._count)):
                self._average.arrived(index)
            self._average.before_step()

        def detach(self) -> None:
            """See Strategy.detach."""
            self._average.detach()

    return TwoPasses()


def _read_mb(file: str, name: str) -> float:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e6


if __name__ == "__main__":
    main()
