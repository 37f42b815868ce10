"""What hvdkit plan predicts for ranks on this machine's CPU, beside what 2 to 8 ranks take.

    python -m benchmarks.plan_ranks

For each number of ranks it measures, with as many processes at the same time, a core and one layer of the model, and
the link by `hvdkit bench allreduce`; then steps of the model divided as dp, tp and pp say (benchmarks/plan_rank.py).
The fastest of several steps counts, as the machine may have other work. Memory is that of parameters and of Adam's two
moments on the rank that has most, in float32 as these ranks train.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hvdkit.tools.bench.report import read_report, show_time
from hvdkit_planner.layout import Calibration, Cluster, Gpu, Layout, Transformer
from hvdkit_planner.measured import measured_cpu, measured_layer, with_links
from hvdkit_planner.search import Job, assess
from hvdkit_planner.step import stage_parameters

MODEL = Transformer(256, 4, 4, 128, vocabulary=512, positions=False, tied=False, fused_attention=True)
BATCH, MICRO_BATCH = 8, 1
LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 4), (2, 2, 2))
#: Of a parameter: itself and two moments.
FLOATS = 3
_LIMIT_S = 120


def main() -> int:
    """Measure, and print the table."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.plan_ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    titles = ("dp", "tp", "pp", "step", "predicted", "error", "state", "predicted", "error")
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    machines: dict[int, tuple[Gpu, Calibration]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for sizes in LAYOUTS:
            layout = Layout(*sizes, MICRO_BATCH)
            if layout.ranks not in machines:
                machines[layout.ranks] = measure_machine(layout.ranks, Path(folder) / "links.json")
            gpu, constants = machines[layout.ranks]
            job = Job(MODEL, Cluster(gpu, layout.ranks), BATCH, constants)
            predicted = assess(job, layout).time.total
            measured, state = measure_step(layout, Path(folder) / "step.json")
            held = FLOATS * 4 * max(stage_parameters(MODEL, layout, stage) for stage in range(layout.pp))
            print(
                f"| {' | '.join(map(str, sizes))} | {show_time(measured)} | {show_time(predicted)} | "
                f"{100 * (predicted / measured - 1):+.0f} % | {state / 1e6:.2f} MB | {held / 1e6:.2f} MB | "
                f"{100 * (held / state - 1):+.1f} % |",
                flush=True,
            )
    return 0


def measure_machine(ranks: int, path: Path) -> tuple[Gpu, Calibration]:
    """Measure a core, a layer and the links while `ranks` processes work."""
    gpu = measured_cpu(ranks)
    constants = measured_layer(MODEL, gpu, ranks)
    if ranks > 1:
        _run(
            ["-m", "hvdkit", "bench", "allreduce", "-np", str(ranks), "--alone", "--rounds", "5", "--output", str(path)]
        )
        gpu, constants = with_links(gpu, constants, read_report(path), width=4)
    return gpu, constants


def measure_step(layout: Layout, path: Path) -> tuple[float, int]:
    """Run the steps; returns the seconds of the fastest, and the largest rank's bytes of parameters and moments."""
    task = {
        "layout": [layout.dp, layout.tp, layout.pp],
        "model": asdict(MODEL),
        "batch": BATCH,
        "micro_batch": MICRO_BATCH,
        "output": str(path),
    }
    rank = ["-m", "benchmarks.plan_rank", json.dumps(task)]
    _run(["-m", "hvdkit.launch", "-np", str(layout.ranks), sys.executable, *rank])
    found = json.loads(path.read_text())
    return float(found["seconds"]), found["parameters"] + found["optimizer"]


def _run(words: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    raise SystemExit(main())
