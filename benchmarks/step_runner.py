"""Measure the time that the step runner adds to a small named operation, for errors and hangs to be known to all ranks.

    hvdrun -np 2 python -m benchmarks.step_runner

The rows "without" execute the operations without hvdkit/engine/named/step_runner.py, which is possible here because no
operation fails. Each round measures both, one after the other. A ratio is the median of the ratios of all rounds.
"""

from __future__ import annotations

import torch

import hvdkit.torch as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.engine.named.execution import Work
from hvdkit.engine.named.step_runner import StepRunner
from hvdkit.launch.cli.numbers import positive_int, positive_seconds
from hvdkit.tools.bench.report import show_bytes, summarise
from hvdkit.tools.bench.timing import Turn, interleave, plan_calls, time_in_a_row

_DO = StepRunner.do


def _do_alone(_: StepRunner, work: Work) -> None:
    """Execute a step without anything that other ranks learn of."""
    work.do()


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=101)
    parser.add_argument("--seconds", type=positive_seconds, default=0.01, help="how long a turn takes, about")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    rows = []
    for nbytes in (4, 2**12, 2**16):
        tensor = torch.zeros(nbytes // 4)

        def call(tensor: torch.Tensor = tensor) -> None:
            hvd.allreduce_(tensor, name="measured", op=hvd.Sum)

        def time_it(count: int, *, alone: bool) -> list[float]:
            StepRunner.do = _do_alone if alone else _DO  # type: ignore[method-assign,assignment]
            try:
                return time_in_a_row(call, hvd.barrier, count)
            finally:
                StepRunner.do = _DO  # type: ignore[method-assign]

        turns: dict[str, Turn] = {
            "without": lambda count: time_it(count, alone=True),
            "with the agreement": lambda count: time_it(count, alone=False),
        }
        times = interleave(turns, plan_calls(turns, options.seconds), options.rounds)
        for name, figures in summarise(times, "without").items():
            rows.append(Row(f"allreduce, {show_bytes(nbytes)}", name, figures.median_s, figures.ratio, "without"))
    finish(rows, f"{hvd.describe()}.", options.json, first=hvd.rank() == 0)


if __name__ == "__main__":
    main()
