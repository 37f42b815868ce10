"""A training under `horovodrun --min-np`: one rank kills itself, and the others go on from the last commit."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hvdkit.torch as hvd

_STEPS, _DIES_AT = 40, 12


def main(killed: Path) -> None:
    """Train a line; killed: a file that tells that the rank has died already."""
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    began = hvd.size()

    @hvd.elastic.run
    def train(state: Any) -> float:
        print(f"begins at {state.step} with {hvd.size()} ranks", flush=True)
        loss = torch.tensor(0.0)
        while state.step < _STEPS:
            if state.step == _DIES_AT and hvd.local_size() == 1 and hvd.size() == began and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            inputs = torch.randn(8, 8)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            state.step += 1
            if state.step % 5 == 0:
                state.commit()
            time.sleep(0.02)
        return loss.item()

    loss = train(state)
    alike = len({round(one, 6) for one in hvd.allgather_object(model.weight.sum().item())}) == 1
    print(f"ends at {state.step} with {hvd.size()} ranks, alike: {alike}, learned: {loss < 1.0}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
