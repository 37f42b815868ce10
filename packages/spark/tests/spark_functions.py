"""What ranks on Spark do in packages/spark/tests/test_spark.py; imported on the executors."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import torch

import hvdkit.torch as hvd


def describe(extra: int, *, fails: str = "") -> dict[str, Any]:
    """The rank as it sees itself. fails: "raise" or "die": what rank 1 does, while rank 0 would wait for ever."""
    hvd.init()
    total = hvd.allreduce(torch.tensor(float(hvd.rank() + extra)), op=hvd.Sum)
    print(f"the first words of rank {hvd.rank()}")
    if fails and hvd.rank() == 0:
        time.sleep(600)
    if fails == "raise":
        raise ValueError("rank 1 does not like it")
    if fails == "die":
        print("the last words of rank 1")
        os.kill(os.getpid(), signal.SIGKILL)
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local_rank": hvd.local_rank(),
        "total": float(total),
        "transport": hvd.describe(),
        "variable": os.environ.get("SPARK_TEST"),
        "horovod": {
            name: value
            for name, value in os.environ.items()
            if re.fullmatch(r"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME)", name)
        },
        "process": os.getpid(),
        "parent": os.getppid(),
    }


def count_steps(steps: int, killed_at: int, folder: str) -> tuple[int, int, int]:
    """An elastic training; at one step of the first start rank 1 kills its executor. Each rank writes its number.

    Returns the steps of all starts, those of this start, and the number of ranks.
    """
    hvd.init()
    Path(folder, f"{os.getpid()}.pid").touch()
    state = hvd.elastic.TorchState(step=0)
    mine = 0

    @hvd.elastic.run
    def train(state: Any) -> None:
        nonlocal mine
        first = state.step == 0
        while state.step < steps:
            hvd.allreduce(torch.ones(1), name="step")
            state.step += 1
            mine += 1
            state.commit()
            if first and state.step == killed_at and hvd.rank() == 1:
                time.sleep(1)  # the commit is on the disk
                kill_executor()

    train(state)
    return state.step, mine, hvd.size()


def kill_executor() -> None:
    """Kill the Java process above this rank, with SIGKILL."""
    pid = os.getpid()
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    time.sleep(600)
