"""What ranks on Ray do in packages/ray/tests/test_ray.py: importable by their processes, and without Ray."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any


def describe(factor: int = 1) -> dict[str, Any]:
    """What a rank finds out of itself and of the others."""
    import torch

    import hvdkit.torch as hvd
    from hvdkit.engine import runtime

    hvd.init()
    total = hvd.allreduce(torch.tensor([factor * (hvd.rank() + 1.0)]), op=hvd.Sum, name="total")
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "total": float(total),
        "transport": runtime.runtime("describe").transport.name,
        "place": [int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")],
        "horovods": [int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK", "CROSS_RANK")],
        "pid": os.getpid(),
        "variable": os.environ.get("OF_THE_TEST"),
        "in_main_thread": threading.current_thread() is threading.main_thread(),  # only that may set signal handlers
    }


class Counter:
    """An object for start(executable_cls=...)."""

    def __init__(self, first: int, step: int = 1) -> None:
        import hvdkit.torch as hvd

        hvd.init()
        self.count, self.step = first + hvd.rank(), step

    def add(self) -> int:
        self.count += self.step
        return self.count


def fail_on(rank: int) -> None:
    """Raise on one rank, while the others wait for it."""
    import torch

    import hvdkit.torch as hvd

    hvd.init()
    if hvd.rank() == rank:
        raise KeyError("of the function")
    hvd.allreduce(torch.ones(1), name="nobody comes")


def end_on(rank: int) -> None:
    """End the process of one rank as the kernel does when memory is short."""
    import torch

    import hvdkit.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(1), name="all are here")
    if hvd.rank() == rank:
        os.kill(os.getpid(), 9)
    hvd.allreduce(torch.ones(1), name="one is not")


def wait_for_a_stopped_rank(rank: int) -> None:
    """One rank stops its process (SIGSTOP), while the others wait for it."""
    import torch

    import hvdkit.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(1), name="all are here")
    if hvd.rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    hvd.allreduce(torch.ones(1), name="one is not")


def work_without_hvdkit(seconds: float) -> int:
    """Be busy with Python code for some time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return os.getpid()


def lose_a_rank_while_the_others_connect(folder: str) -> dict[str, Any]:
    """As train_elastic(); but rank 1 of the first world dies before it connects."""
    died = Path(folder, "died")
    if os.environ["RANK"] == "1" and not died.exists():
        died.write_text(str(os.getpid()))
        time.sleep(1)  # the other one is in init() by then
        os.kill(os.getpid(), 9)
    return train_elastic(folder, several_hosts=False)


def train_elastic(folder: str, several_hosts: bool) -> dict[str, Any]:
    """Add up until the file `stop` is there; each step is a line of `steps`. several_hosts: each node of Ray is one."""
    import torch

    import hvdkit.torch as hvd
    from hvdkit.transport.gloo import rendezvous

    if several_hosts:
        import ray

        node = ray.get_runtime_context().get_node_id()
        rendezvous._machine = lambda: node

    @hvd.elastic.run
    def train(state: Any) -> None:
        stop = False
        while not stop:
            ones = hvd.allreduce(torch.ones(5), op=hvd.Sum, name="ones")
            state.sum = state.sum + ones  # each step adds the number of ranks
            state.expected += hvd.size()
            state.step += 1
            with Path(folder, "steps").open("a") as file:
                print(json.dumps([state.step, hvd.size(), hvd.rank(), os.getpid()]), file=file)
            stop = hvd.broadcast_object(Path(folder, "stop").exists(), 0)
            time.sleep(0.02)
            state.commit()

    hvd.init()
    state = hvd.elastic.TorchState(sum=torch.zeros(5), expected=0, step=0)
    train(state)
    from hvdkit.engine import runtime

    return {
        "steps": state.step,
        "sums": state.sum.tolist(),
        "expected": state.expected,
        "pid": os.getpid(),
        "transport": runtime.runtime("train").transport.name,
    }
