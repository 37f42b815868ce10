"""All strategies on one task in one run: test loss against wall time, as a table and a chart.

    python -m benchmarks.strategies --chart strategies.svg

Three ranks of this machine train the same network on handwritten digits, the last of them three times as slow as the
others (--times 1 for equal ones). Computation is a sleep for each row, so that ranks do not take cores from each other.
Every strategy begins with the same parameters and takes the same number of steps of the same optimizer, one strategy
after the other. Rank 0 keeps copies of its parameters, which are tested when the time is no longer measured; with local
SGD and DiLoCo these are its own replica's between meetings, and the average at the end. "predicted" is what `hvdkit
profile` would say of these ranks. A strategy is a line in the table WAYS of strategies_rank.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import positive
from hvdkit.errors import HvdkitError
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.report import describe_machine
from hvdkit.tools.charts import check_plot, draw_lines, new_figure

_LIMIT_S = 600.0
_ENOUGH = 0.3  # test loss that a strategy's time is taken to


def main() -> int:
    """Run the ranks, print the table, draw the chart, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive_int, default=3)
    parser.add_argument("--times", type=positive, default=3.0, help="by which the last rank is slower")
    parser.add_argument("--row-ms", type=positive, default=1.0, help="of a fast rank")
    parser.add_argument("--epochs", type=positive_int, default=12)
    parser.add_argument("--only", default="", metavar="NAME,...", help="strategies whose names contain one of these")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw FILE.svg, FILE.png or FILE.pdf")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all points there as well")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: strategies differ in how ranks meet; use 2 or more")
    try:
        if options.chart:
            check_plot("--chart", options.chart)
    except HvdkitError as error:
        parser.error(str(error))
    figure = new_figure("--chart", 9, 5) if options.chart else None
    runs = run_ranks(options.ranks, options.times, options.row_ms, options.epochs, options.only)
    if not runs:
        parser.error(
            f"--only {options.only}: no strategy's name contains it; see WAYS in benchmarks/strategies_rank.py"
        )
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    print(f"{machine}\n\n{build_table(runs)}")
    if figure is not None:
        axis = figure.subplots()
        draw_lines(axis, {run["name"]: run["points"] for run in runs})
        axis.set(
            title=f"digits, {options.ranks} ranks, the last {options.times:g} times as slow",
            xlabel="seconds",
            ylabel="test loss",
            yscale="log",
        )
        figure.savefig(options.chart)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1))
    return 0


def run_ranks(ranks: int, times: float, row_ms: float, epochs: int, only: str) -> list[dict[str, Any]]:
    """What rank 0 has noted of each strategy. Raises RuntimeError if the job fails."""
    with tempfile.TemporaryDirectory(prefix="strategies-") as folder:
        path = Path(folder, "runs.json")
        command = [sys.executable, "-m", "hvdkit.launch", "-np", str(ranks), sys.executable]
        command += ["-m", "benchmarks.strategies_rank", str(path), str(times), str(row_ms), str(epochs), only]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HVDKIT_STRAGGLER_PERCENT": "0"}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_LIMIT_S, env=env, check=False)
        if done.returncode:
            raise RuntimeError(f"the job ended with exit code {done.returncode}")
        runs: list[dict[str, Any]] = json.loads(path.read_text())
        return runs


def build_table(runs: Sequence[dict[str, Any]]) -> str:
    """One line a strategy, in Markdown. runs: name, points (seconds, test loss), accuracy, predicted speedup."""
    lines = [
        f"| strategy | seconds | speedup | predicted | seconds to a loss of {_ENOUGH:g} | test loss | accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    whole_s = runs[0]["points"][-1][0]
    for run in runs:
        seconds, loss = run["points"][-1]
        reached = next((f"{at:.1f}" for at, each in run["points"] if each <= _ENOUGH), "not reached")
        predicted = "" if run["predicted"] is None else f"x{run['predicted']:.2f}"
        lines.append(
            f"| {run['name']} | {seconds:.1f} | x{whole_s / seconds:.2f} | {predicted} | {reached} | {loss:.3f} | "
            f"{100 * run['accuracy']:.1f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
