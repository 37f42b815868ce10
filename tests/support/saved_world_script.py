"""The training of elastic_world_script with checkpoints on a disk: it outlives ranks, and the end of the job too.

Arguments: folder of the checkpoints, steps between commits, and a file with which training ends as soon as it is there.

SLEEP keeps a rank from working for a while, RAISE makes it raise.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from elastic_world_script import batch_of, learn, make_model, make_optimizer, summary

import hvdkit.torch as hvd

SLEEP, RAISE = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
_STEP_S = 0.02
_SAVE_EVERY_S = 0.3


def _sleep(*_: object) -> None:
    time.sleep(2)


def _raise(*_: object) -> None:
    raise RuntimeError("as it was told to")


def main(folder: str, commit_every: int, finish: str) -> None:
    signal.signal(SLEEP, _sleep)
    signal.signal(RAISE, _raise)
    torch.set_num_threads(1)
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    checkpoints = hvd.checkpoint.Checkpoints(folder, every_s=_SAVE_EVERY_S, model=model, optimizer=optimizer, step=0)
    print(f"pid {os.getpid()}", flush=True)

    @hvd.elastic.run
    def train(state: Any) -> None:
        if state.step == 0 and checkpoints.load():  # all have the same state here, those that came later too
            state.step = checkpoints.values["step"]
            state.commit()
        while True:
            learn(model, optimizer, batch_of(state.step)[hvd.rank() :: hvd.size()])
            state.step += 1
            time.sleep(_STEP_S)
            checkpoints.values["step"] = state.step
            checkpoints.step()
            if state.step % commit_every == 0:
                state.commit()
                if state.tell(os.path.exists(finish)):
                    return
                if hvd.rank() == 0:
                    print(f"committed {state.step}", flush=True)

    train(state)
    checkpoints.close()
    alike = len(set(map(tuple, hvd.allgather_object(summary(model))))) == 1
    if hvd.rank() == 0:
        print(json.dumps({"summary": summary(model), "alike": alike, "step": state.step}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
