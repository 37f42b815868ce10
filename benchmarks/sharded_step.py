"""A training step with the optimizer's state divided among the ranks, beside the same step with all of it on each.

    hvdrun -np 2 python -m benchmarks.sharded_step

Every rank trains the models of `hvdkit bench step` with AdamW, a few steps at a time, in turns and round after round,
without communication, with DistributedOptimizer and with each value of its `shard`. Medians over all rounds; ratios to
the step without shard, within a round. Below them the bytes of optimizer state on the rank that has most.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

import hvdkit.torch as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.models import Model, find_models
from hvdkit.tools.bench.report import STEPS, summarise
from hvdkit.tools.bench.timing import Turn, interleave, time_each

_WHOLE = "without shard"
_AIM = 1.1
_STATE_AIM = 1.05


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--only", nargs="*", default=(), help="models whose name contains one of these")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for model in find_models(options.only):
        peers = {_WHOLE: None, 'shard="optimizer"': "optimizer", 'shard="gradients"': "gradients"}
        steps = {peer: _Training(model, shard) for peer, shard in peers.items()}
        turns: dict[str, Turn] = {peer: functools.partial(_time, one) for peer, one in steps.items()}
        for turn in turns.values():
            turn(3)
        times = interleave(turns, dict.fromkeys(turns, STEPS), options.rounds)
        for peer, figures in summarise(times, _WHOLE).items():
            aim = "" if peer == _WHOLE else f"at most x{_AIM:.2f}"
            met = figures.ratio <= _AIM if aim else None
            rows.append(Row(model.name, peer, figures.median_s, figures.ratio, _WHOLE, aim, met))
        held = {peer: max(hvd.allgather_object(one.state_bytes())) for peer, one in steps.items()}
        for peer, nbytes in held.items():
            part = nbytes / held[_WHOLE] * hvd.size()
            aim = "" if peer == _WHOLE else f"at most x{_STATE_AIM:.2f} of 1/{hvd.size()}"
            met = part <= _STATE_AIM if aim else None
            rows.append(Row(f"{model.name}, state", peer, None, None, "", aim, met, nbytes / 1e6))
    finish(rows, hvd.describe(), options.json, first=hvd.rank() == 0)


class _Training:
    """A model and its optimizer."""

    def __init__(self, model: Model, shard: str | None) -> None:
        torch.manual_seed(0)
        self._module, self._model = model.make(), model
        self._inputs, self._targets = model.batch()
        optimizer = torch.optim.AdamW(self._module.parameters(), lr=1e-4)
        self._optimizer: Any = hvd.DistributedOptimizer(optimizer, self._module.named_parameters(), shard=shard)

    def step(self) -> None:
        """One step."""
        self._optimizer.zero_grad()
        loss: torch.Tensor = self._model.loss(self._module(self._inputs), self._targets)
        loss.backward()
        self._optimizer.step()

    def state_bytes(self) -> int:
        """Of the optimizer, on this rank."""
        states = self._optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def _time(training: _Training, count: int) -> list[float]:
    return time_each(training.step, hvd.barrier, count)


if __name__ == "__main__":
    main()
