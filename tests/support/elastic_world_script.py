"""A training whose end does not depend on how many ranks there are: they share each batch of 12.

Prints its process number, and at its end what it has come to. Arguments: steps, seconds a step, steps between
commits, a file with which training ends as soon as it is there ("" for none), and what is divided among the ranks; or
"diloco": each rank takes the whole batch then.

SIGUSR1 keeps a rank from working for a while, SIGUSR2 makes it raise.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from without_compiler import put_compiler_off

import hvdkit.torch as hvd

put_compiler_off()

SAMPLES, BATCH = 48, 12


def make_model() -> torch.nn.Module:
    torch.manual_seed(5)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    return torch.nn.Sequential(*layers).double()


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).sin()


def batch_of(step: int) -> torch.Tensor:
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))[:BATCH]


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, indices: torch.Tensor) -> None:
    inputs, wanted = make_data()
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs[indices]), wanted[indices]).backward()
    optimizer.step()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def summary(model: torch.nn.Module) -> list[float]:
    return [float(one.detach().sum()) for one in model.parameters()]


def reference(steps: int) -> list[float]:
    """What one process comes to that nothing happens to."""
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(steps):
        learn(model, optimizer, batch_of(step))
    return summary(model)


def diloco_reference(steps: int, every: int = 8) -> list[float]:
    """The same of DiLoCo, whose ranks all do the same."""
    model = make_model()
    optimizer = make_optimizer(model)
    shared = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    outer = torch.optim.SGD(shared, 0.7, momentum=0.9, nesterov=True)
    for step in range(1, steps + 1):
        learn(model, optimizer, batch_of(step - 1))
        if step % every == 0:
            with torch.no_grad():
                for value, parameter in zip(shared, model.parameters(), strict=True):
                    value.grad = value - parameter
                outer.step()
                for value, parameter in zip(shared, model.parameters(), strict=True):
                    parameter.copy_(value)
    return summary(model)


def _sleep(*_: object) -> None:
    time.sleep(2)


def _raise(*_: object) -> None:
    raise RuntimeError("as it was told to")


def horovods_numbers() -> tuple[int, ...]:
    """What a script for Horovod reads in the variables of its process."""
    names = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE".split()
    return tuple(int(os.environ[f"HOROVOD_{name}"]) for name in names)


def main(steps: int, pause_s: float, commit_every: int, finish: str = "", shard: str = "") -> None:
    signal.signal(signal.SIGUSR1, _sleep)
    signal.signal(signal.SIGUSR2, _raise)
    torch.set_num_threads(1)
    started_as = horovods_numbers()
    hvd.init()
    model = make_model()
    if shard == "diloco":
        optimizer = hvd.DiLoCo(make_optimizer(model), model=model, every=8)
    else:
        optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters(), shard=shard or None)
    state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[])
    print(f"pid {os.getpid()}", flush=True)

    def reset() -> None:
        hvd.shutdown()
        hvd.init()

    def train(state: Any) -> None:
        state.sizes.append(hvd.size())
        while state.step < steps:
            batch = batch_of(state.step)
            learn(model, optimizer, batch if shard == "diloco" else batch[hvd.rank() :: hvd.size()])
            state.step += 1
            time.sleep(pause_s)
            if state.step % commit_every == 0:
                state.commit()
                if finish and state.tell(os.path.exists(finish)):
                    break
                if hvd.rank() == 0:
                    print(f"committed {state.step}", flush=True)

    hvd.elastic.run_fn(train, reset)(state)
    alike = len(set(map(tuple, hvd.allgather_object(summary(model))))) == 1
    places = dict(hvd.allgather_object((os.getpid(), hvd.local_rank())))
    numbers = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    variables = hvd.allgather_object((started_as, horovods_numbers() == numbers))
    if hvd.rank() == 0:
        print(
            json.dumps(
                {
                    "places": places,
                    "started_as": [started for started, _ in variables],
                    "variables_follow": all(follow for _, follow in variables),
                    "summary": summary(model),
                    "alike": alike,
                    "sizes": state.sizes,
                    "size": hvd.size(),
                    "step": state.step,
                }
            )
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
