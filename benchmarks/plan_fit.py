"""The planner's constants: fitted to one half of the model sizes of one node, and judged on the other half.

    python -m benchmarks.plan_fit

prints the constants that hvdkit_planner/layout.py holds, and the errors. The fit is the least squares of log
errors, and of the distance from what data sheets and common measurements of A100s say: sizes of up to 2048 alone do not
determine all constants that larger models need. Runs count the more, the nearer they are to the fastest of their job,
and combinations of width, tp and micro-batch that have few runs more than others: by cross-validation in the fitted
half. The rows of published.csv are predicted only after the fit, but the first three spreads were chosen with them in
view.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from hvdkit_planner.evaluate import Evaluation, Row, describe, evaluate, read_table
from hvdkit_planner.layout import PRESETS, Calibration
from hvdkit_planner.step import compute_step

DATA = Path(__file__).parent / "plan_data"

#: Width and layers of the half that is fitted to: every other number of layers, shifted between the two widths.
FITTED = ((1024, 12), (1024, 20), (2048, 16), (2048, 24))

#: A constant -> what it is expected to be, and by which factor (of e) it may well differ.
EXPECTED = {
    "product_efficiency": (0.8, 0.02),
    "tail_waves": (0.5, 0.2),
    "memory_efficiency": (0.8, 0.05),
    "kernel_s": (4e-6, 0.5),
    "launch_s": (40e-6, 0.5),
    "collective_launch_s": (25e-6, 1.0),
    "collective_s": (40e-6, 0.7),
    "link_efficiency": (0.75, 0.1),
    "logit_bytes": (30.0, 0.5),
    "whole_head": (1.0, 1.0),
    "update_bytes": (30.0, 0.3),
}
_SPREAD = 0.08  # of the log errors of a model that is right


def halves(constants: Calibration) -> tuple[Evaluation, Evaluation]:
    """Predict the half that is fitted to, and the other one."""
    whole = evaluate(read_table(DATA / "single_node.csv"), PRESETS["a100-80"], constants, {})

    def part(fitted: bool) -> Evaluation:
        chosen = [
            number
            for number, verdict in enumerate(whole.verdicts)
            if verdict.row and ((verdict.row.model.hidden, verdict.row.model.layers) in FITTED) == fitted
        ]
        return Evaluation(
            whole.header, [whole.cells[each] for each in chosen], [whole.verdicts[each] for each in chosen]
        )

    return part(True), part(False)


def fit(rows: Sequence[Row]) -> Calibration:
    """Fit the constants to rows with one layout each."""
    groups = [(row.model.hidden, row.layouts[0].tp, row.layouts[0].micro_batch) for row in rows]
    counts = Counter(groups)
    measured = np.log([row.measured or np.nan for row in rows])
    jobs = [(row.model, row.cluster.gpus, row.batch) for row in rows]
    best = {job: min(time for time, other in zip(measured, jobs, strict=True) if other == job) for job in set(jobs)}
    weights = np.array([counts[group] ** -0.25 for group in groups])
    weights *= np.exp([best[job] - time for job, time in zip(jobs, measured, strict=True)])
    weights *= (len(counts) / np.sum(weights**2)) ** 0.5 / _SPREAD
    start = np.log([value for value, _ in EXPECTED.values()])
    spreads = np.array([spread for _, spread in EXPECTED.values()])

    def residuals(logs: np.ndarray) -> np.ndarray:
        constants = _constants(logs)
        times = [compute_step(row.model, row.layouts[0], row.cluster, row.batch, constants).total for row in rows]
        return np.concatenate([(np.log(times) - measured) * weights, (logs - start) / spreads])

    return _constants(least_squares(residuals, start).x)


def _constants(logs: np.ndarray) -> Calibration:
    return replace(Calibration(), **dict(zip(EXPECTED, map(float, np.exp(logs)), strict=True)))


def main() -> int:
    """Fit, and print constants and errors."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.plan_fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    constants = fit([verdict.row for verdict in halves(Calibration())[0].verdicts if verdict.row])
    for name, (value, _) in EXPECTED.items():
        print(
            f"{name:20} {getattr(constants, name):9.3g}   expected {value:9.3g}   "
            f"used {getattr(Calibration(), name):9.3g}"
        )
    fitted, others = halves(Calibration())
    published = evaluate(read_table(DATA / "published.csv"), PRESETS["a100-80"], Calibration(), {})
    for title, found in (("fitted to", fitted), ("the other half", others), ("published, to 3072 GPUs", published)):
        print(f"\n{title}\n  " + "\n  ".join(describe(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
