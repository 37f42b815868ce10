"""Throughput of ranks of unequal speed: equal shares of a batch beside BalancedSampler.

    hvdrun -np 3 python -m benchmarks.uneven

The last rank computes a row in --times as long as the others. Computation is a sleep for each row, so that ranks do not
take cores from each other; the model is small, so that a step is computation. Both ways train on the same batches, in
turns, round after round. A step lasts until the last rank has ended it. The ideal follows from the speeds: with 1, 1
and 1/3 all ranks together compute 7/3 rows in the time of one, and with equal shares 3 times 1/3, which is x2.33.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.tools.bench.report import summarise
from hvdkit.tools.bench.timing import Turn, interleave
from hvdkit.training.balance import shares, step_s

_EQUAL, _BALANCED = "equal shares", "BalancedSampler"
_AIM = 1.7


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--batch", type=int, default=84, help="rows of all ranks together")
    parser.add_argument("--row-ms", type=float, default=4.0, help="of a fast rank")
    parser.add_argument("--times", type=float, default=3.0, help="by which the last rank is slower")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    last = hvd.rank() == hvd.size() - 1
    row_s = options.row_ms / 1e3 * (options.times if last else 1.0)
    trainings = {name: _Training(name, options.batch, row_s) for name in (_EQUAL, _BALANCED)}
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
    plans = hvd.allgather_object(trainings[_BALANCED].sampler.plan)
    finish(rows, hvd.describe(), options.json, first=hvd.rank() == 0)
    if hvd.rank() == 0:
        print(f"\nIdeal: x{ideal:.2f}. Rows of each rank: {plans[0]} instead of {equal}.")


class _Training:
    """A small model, whose rows take a time."""

    def __init__(self, name: str, batch: int, row_s: float) -> None:
        torch.manual_seed(0)
        self._row_s = row_s
        self._model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._optimizer: Any = hvd.DistributedOptimizer(optimizer, self._model.named_parameters())
        # A sampler that never exchanges times keeps its equal shares.
        every = 10 if name == _BALANCED else 10**9
        data = TensorDataset(torch.randn(batch * 50, 64))
        self.sampler = hvd.data.BalancedSampler(data, batch, self._optimizer, every=every)
        self._batches = self._endless(DataLoader(data, batch_sampler=self.sampler))

    def _endless(self, loader: DataLoader[Any]) -> Iterator[torch.Tensor]:
        while True:
            for (rows,) in loader:
                yield rows

    def steps(self, count: int) -> list[float]:
        """So many steps; the seconds of each."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            rows = next(self._batches)
            time.sleep(self._row_s * len(rows))
            self._optimizer.zero_grad()
            self._model(rows).square().mean().backward()
            self._optimizer.step()
            times.append(time.perf_counter() - began)
        return times


if __name__ == "__main__":
    main()
