"""What a rank of benchmarks.recovery does: notes, in a file of its own, when things happen.

python -m benchmarks.recovery_rank FOLDER recover VICTIM
python -m benchmarks.recovery_rank FOLDER commit
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.tools.bench.models import find_models

_DIES_AT, _STEPS_AFTER = 40, 20
_ROUNDS, _STEPS = 8, 20


class Notes:
    """Lines of JSON in a file of this process."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, str(os.getpid()))

    def add(self, what: str, **more: Any) -> None:
        """Note that something happens now."""
        with self._path.open("a") as file:
            file.write(json.dumps({"what": what, "time": time.time(), **more}) + "\n")


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """One step of a training."""
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def recover(notes: Notes, victim: int) -> None:
    """Train until a world of all ranks, of which one had died, has taken some steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0, worlds=0)
    batch = torch.randn(32, 64)

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.worlds += 1
        taken = 0
        while taken < _STEPS_AFTER or state.worlds < 3:
            if state.worlds == 1 and state.step == _DIES_AT and hvd.rank() == victim:
                notes.add("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, optimizer, batch)
            state.step += 1
            taken += 1
            if taken == 1:
                notes.add("first step", ranks=hvd.size())
            time.sleep(0.005)
            if state.step % 5 == 0:
                state.commit()

    train(state)


def commit(notes: Notes) -> None:
    """Time steps of the MLP with commits each so often; the three take turns."""
    made = find_models(["MLP"])[0]
    model = made.make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    batch = made.batch()[0]

    @hvd.elastic.run
    def train(state: Any) -> None:
        times: dict[int, list[float]] = {0: [], 10: [], 1: []}
        for at in range(_ROUNDS + 1):
            for every, seconds in times.items():
                began = time.perf_counter()
                for number in range(1, _STEPS + 1):
                    step(model, optimizer, batch)
                    if every and number % every == 0:
                        state.commit()
                if at:
                    seconds.append((time.perf_counter() - began) / _STEPS)
        for every, seconds in times.items():
            if hvd.rank() == 0:
                notes.add("commits", every=str(every), median_s=statistics.median(seconds))

    train(state)


def main() -> None:
    """Join the others, and do what is asked for."""
    torch.set_num_threads(1)
    hvd.init()
    notes = Notes(sys.argv[1])
    if sys.argv[2] == "recover":
        recover(notes, int(sys.argv[3]))
    else:
        commit(notes)


if __name__ == "__main__":
    main()
