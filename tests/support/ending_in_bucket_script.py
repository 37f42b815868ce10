"""A training of three ranks in process groups of torch; rank 1 sends itself a signal while a bucket is reduced.

Its gradient of the first layer is not computed then, while the buckets of later layers have begun on all ranks.
Prints its process number, and at its end the numbers of ranks that it has trained with. Arguments: the signal, and the
number of steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from without_compiler import put_compiler_off

import hvdkit.torch as hvd

put_compiler_off()

AT = 10  # step


def main(name: str, steps: int) -> None:
    torch.set_num_threads(1)
    hvd.init()
    victim = (hvd.rank(), hvd.size()) == (1, 3)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.001), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[])
    print(f"pid {os.getpid()}", flush=True)

    def end(_: torch.Tensor) -> None:
        if victim and state.step == AT and hvd.size() == 3:
            os.kill(os.getpid(), getattr(signal, name))

    model.get_parameter("0.weight").register_hook(end)

    def reset() -> None:
        hvd.shutdown()
        hvd.init()

    def train(state: Any) -> None:
        state.sizes.append(hvd.size())
        while state.step < steps:
            optimizer.zero_grad()
            model(torch.ones(2, 32)).square().sum().backward()
            optimizer.step()
            state.step += 1
            time.sleep(0.01)
            if state.step % 5 == 0:
                state.commit()

    hvd.elastic.run_fn(train, reset)(state)
    alike = hvd.allreduce(model.get_parameter("0.weight").detach()).equal(model.get_parameter("0.weight"))
    if hvd.rank() == 0:
        print(f"trained with {state.sizes} ranks, alike: {alike}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
