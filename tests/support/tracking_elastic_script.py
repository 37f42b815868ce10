"""An elastic training that tracks: arguments are a folder and the number of steps."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import fake_mlflow
import torch
from without_compiler import put_compiler_off

import hvdkit.torch as hvd

put_compiler_off()
fake_mlflow.install()


@hvd.elastic.run
def train(state: Any, folder: str, steps: int) -> None:
    with hvd.track(csv=f"{folder}/run.csv", mlflow="uri", every=2) as tracker:
        while state.step < steps:
            hvd.allreduce(torch.ones(1), name="gradient")
            tracker.log({"size": hvd.size()}, step=state.step)
            state.step += 1
            time.sleep(0.02)
            if state.step % 5 == 0:
                state.commit()
                if hvd.rank() == 0:
                    print(f"committed {state.step}", flush=True)


hvd.init()
print(f"pid {os.getpid()}", flush=True)
train(hvd.elastic.TorchState(step=0), sys.argv[1], int(sys.argv[2]))
