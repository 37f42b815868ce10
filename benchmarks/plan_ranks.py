"""What hvdkit plan predicts for ranks on this machine's CPU, beside what 2 to 8 ranks take.

    python -m benchmarks.plan_ranks

For each number of ranks it measures, with as many processes at the same time, a core and one layer of the model, and
the link by `hvdkit bench allreduce`; then steps of the model divided as dp, tp and pp say (benchmarks/plan_rank.py).
The fastest of several steps counts, as the machine may have other work.
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

from hvdkit.tools.bench.report import read_report
from hvdkit.tools.bench.summary import show_time
from hvdkit.tools.plan.calibration import Calibration
from hvdkit.tools.plan.cluster import Cluster, Gpu
from hvdkit.tools.plan.layout import Layout
from hvdkit.tools.plan.measured import measured_cpu, measured_layer, with_links
from hvdkit.tools.plan.model import Transformer
from hvdkit.tools.plan.search import Job, assess

MODEL = Transformer(256, 4, 4, 128, vocabulary=512, positions=False, tied=False, fused_attention=True)
BATCH, MICRO_BATCH = 8, 1
LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 4), (2, 2, 2))
_LIMIT_S = 120


def main() -> int:
    """Measure, and print the table."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.plan_ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    print("| dp | tp | pp | measured | predicted | error |\n|---|---|---|---|---|---|")
    machines: dict[int, tuple[Gpu, Calibration]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for sizes in LAYOUTS:
            layout = Layout(*sizes, MICRO_BATCH)
            if layout.ranks not in machines:
                machines[layout.ranks] = measure_machine(layout.ranks, Path(folder) / "links.json")
            gpu, constants = machines[layout.ranks]
            job = Job(MODEL, Cluster(gpu, layout.ranks), BATCH, constants)
            predicted = assess(job, layout).time.total
            measured = measure_step(layout, Path(folder) / "step.json")
            print(
                f"| {' | '.join(map(str, sizes))} | {show_time(measured)} | {show_time(predicted)} | "
                f"{100 * (predicted / measured - 1):+.0f} % |",
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


def measure_step(layout: Layout, path: Path) -> float:
    """Run the steps; returns the seconds of the fastest."""
    task = {
        "layout": [layout.dp, layout.tp, layout.pp],
        "model": asdict(MODEL),
        "batch": BATCH,
        "micro_batch": MICRO_BATCH,
        "output": str(path),
    }
    rank = ["-m", "benchmarks.plan_rank", json.dumps(task)]
    _run([str(Path(sys.executable).with_name("hvdrun")), "-np", str(layout.ranks), sys.executable, *rank])
    return float(json.loads(path.read_text()))


def _run(words: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    raise SystemExit(main())
