"""An elastic training of ranks that need not wait for one another: one of them kills itself, the others go on."""

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


def main(kind: str, victim: int, killed: Path) -> None:
    """Train a line. killed: a file that tells that the victim has died already."""
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = getattr(hvd, kind)(plain, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def train(state: Any) -> float:
        print(f"begins at {state.step} with {hvd.size()} ranks", flush=True)
        loss = torch.tensor(0.0)
        while state.step < _STEPS:
            if state.step == _DIES_AT and hvd.rank() == victim and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            inputs = torch.randn(8, 8)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            state.step += 1
            if state.step % 5 == 0:
                optimizer.finish()
                state.commit()
            time.sleep(0.02)
        return loss.item()

    loss = train(state)
    alike = len({round(one, 6) for one in hvd.allgather_object(model.weight.sum().item())}) == 1
    print(f"ends at {state.step} with {hvd.size()} ranks, alike: {alike}, learned: {loss < 3.0}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
