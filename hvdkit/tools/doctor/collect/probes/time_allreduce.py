"""A rank of doctor's small job: sum an array a few times over the transport that training takes, and say who one is."""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import sys
import time
from typing import Any

import numpy as np

from hvdkit.config import read_config, read_environment
from hvdkit.engine.startup import open_world
from hvdkit.transport.buffer import as_buffer

_TIMES = 5


def main(count: int) -> None:
    """Print who this rank is; on rank 0 also how many seconds a sum of `count` float32 took."""
    world, transport, _ = open_world(read_config())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    visible = read_environment().get("CUDA_VISIBLE_DEVICES")
    _print(rank=world.rank, size=world.size, host=socket.gethostname(), cores=cores, visible=visible)
    buffer = as_buffer(np.ones(count, np.float32))
    seconds = []
    for _ in range(_TIMES + 1):
        transport.barrier()
        began = time.perf_counter()
        transport.allreduce(buffer, "sum")
        seconds.append(time.perf_counter() - began)
    if world.rank == 0:
        _print(seconds=statistics.median(seconds[1:]), transport=_name(transport))
    transport.close()


def _name(transport: object) -> str:
    """The setting's word for it: "shared_memory" of SharedMemoryTransport."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(transport).__name__.removesuffix("Transport")).lower()


def _print(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
