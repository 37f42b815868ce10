"""A whole training step, peers side by side: no communication, hvdkit, torch DDP on Gloo, and with Horovod two more.

    hvdrun -np 2 python -m benchmarks.step_time

What `hvdkit bench step` measures, beside its aims: every rank trains the same model with each peer in turn, a few steps
at a time, round after round. The ranks begin each step together, and the slower one's time counts. Medians over all
rounds, and ratios to the step without communication, each taken within its round.
"""

from __future__ import annotations

import hvdkit.torch as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.tools.bench.figures import NO_COMMUNICATION, OURS, summarise
from hvdkit.tools.bench.models import find_models
from hvdkit.tools.bench.plan import Plan
from hvdkit.tools.bench.rank import joined, measure_step

AIMS = {"MLP, 8 x 1024x1024": 1.05, "small conv net": 1.05, "101 small layers": 1.25}


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="threads that each rank computes with")
    parser.add_argument("--only", nargs="*", default=(), help="models whose name contains one of these")
    options = parser.parse_args()
    plan = Plan("step", models=options.only, rounds=options.rounds, threads=options.threads)
    with joined(plan.threads) as (job, notes):
        where, rows = " ".join([hvd.describe() + ".", *notes]), []
        for model in find_models(plan.models):
            times = measure_step(plan, model, job)[0].times
            for peer, figures in summarise(times, NO_COMMUNICATION).items():
                aim = AIMS[model.name]
                told, met = (f"at most x{aim:.2f}", figures.ratio <= aim) if peer == OURS else ("", None)
                rows.append(Row(model.name, peer, figures.median_s, figures.ratio, NO_COMMUNICATION, told, met))
        finish(rows, where, options.json, first=hvd.rank() == 0)


if __name__ == "__main__":
    main()
