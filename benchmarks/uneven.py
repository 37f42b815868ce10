"""Throughput of ranks of unequal speed: equal shares of a batch beside rows by speed.

    hvdrun -np 3 python -m benchmarks.uneven
    KERAS_BACKEND=jax hvdrun -np 3 python -m benchmarks.uneven --keras

Rows by speed are those of BalancedSampler of PyTorch, with --keras of BalancedDataset in fit().

The last rank computes a row in --times as long as the others. Computation is a sleep for each row, so that ranks do not
take cores from each other; the model is small, so that a step is computation. Both ways train on the same batches, in
turns, round after round. A step lasts until the last rank has ended it. The ideal follows from the speeds: with 1, 1
and 1/3 all ranks together compute 7/3 rows in the time of one, and with equal shares 3 times 1/3, which is x2.33.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from benchmarks.rows import Row, build_parser, finish, positive
from hvdkit.balance.shares import shares, step_s
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.report import summarise
from hvdkit.tools.bench.timing import Turn, interleave

_EQUAL, _BALANCED = "equal shares", "rows by speed"
_AIM = 1.7


class Training(Protocol):
    """A small model, whose rows take a time."""

    def __init__(self, batch: int, row_s: float, every: int) -> None:
        """batch: rows of all ranks together. every: steps between exchanges of speeds."""

    @property
    def plan(self) -> tuple[int, ...]:
        """Rows of each rank."""

    def steps(self, count: int) -> list[float]:
        """So many steps; the seconds of each."""


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--steps", type=positive_int, default=10, help="of a round")
    parser.add_argument("--batch", type=positive_int, default=84, help="rows of all ranks together")
    parser.add_argument("--row-ms", type=positive, default=4.0, help="of a fast rank")
    parser.add_argument("--times", type=positive, default=3.0, help="by which the last rank is slower")
    parser.add_argument("--keras", action="store_true", help="in fit() of Keras, on KERAS_BACKEND")
    options = parser.parse_args()
    framework = "keras" if options.keras else "torch"
    hvd: Any = importlib.import_module(f"hvdkit.{framework}")
    kind: type[Training] = importlib.import_module(f"benchmarks.uneven_{framework}").Training
    hvd.init()
    last = hvd.rank() == hvd.size() - 1
    row_s = options.row_ms / 1e3 * (options.times if last else 1.0)
    # Ranks that never exchange their speeds keep equal shares.
    trainings = {name: kind(options.batch, row_s, every) for name, every in {_EQUAL: 10**9, _BALANCED: 10}.items()}
    turns: dict[str, Turn] = {name: one.steps for name, one in trainings.items()}
    for turn in turns.values():
        turn(30)  # until the shares have settled
    times = interleave(turns, dict.fromkeys(turns, options.steps), options.rounds)
    speeds = [1.0] * (hvd.size() - 1) + [1 / options.times]
    equal = shares([1.0] * hvd.size(), options.batch)
    ideal = step_s(equal, speeds) / step_s(shares(speeds, options.batch), speeds)
    rows = []
    work = f"{hvd.size()} ranks, the last {options.times:g} times as slow"
    for name, figures in summarise(times, _BALANCED).items():
        aim = f"at least x{_AIM}" if name == _EQUAL else ""
        met = figures.ratio >= _AIM if aim else None
        rows.append(Row(work, name, figures.median_s, figures.ratio, _BALANCED, aim, met))
    plans = hvd.allgather_object(trainings[_BALANCED].plan)
    finish(rows, hvd.describe(), options.json, first=hvd.rank() == 0)
    if hvd.rank() == 0:
        print(f"\nIdeal: x{ideal:.2f}. Rows of each rank: {plans[0]} instead of {equal}.")


if __name__ == "__main__":
    main()
