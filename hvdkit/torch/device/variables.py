"""The environment variables that a constructor of torch reads, set for the time of its call only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

#: ProcessGroupNCCL reads these in its constructor. Its watchdog thread would end the process at an error of the
#: network, before hvdkit can name the rank that was lost, or at an error of CUDA, which other calls raise too; and so
#: would the monitor of the watchdog. In mode 0 of TORCH_NCCL_ASYNC_ERROR_HANDLING the watchdog only reports an error,
#: so that hvdkit records its own error and then aborts. In mode 2 it aborts first: waiting operations then end as if
#: they had succeeded, with undefined numbers. It would also wait for a dump, with a lock that operations take.
NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_DESYNC_VARIABLES = ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG")


def nccl_variables() -> Mapping[str, str]:
    """Return NCCL_VARIABLES; with mode 2 under torch's desync debugging, which turns 0 into 3: end the process."""
    torch_distributed: Any = dist  # its types lack these names
    detailed = torch_distributed.get_debug_level() == torch_distributed.DebugLevel.DETAIL
    debugs = detailed or any(name in os.environ for name in _DESYNC_VARIABLES)
    return {**NCCL_VARIABLES, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"} if debugs else NCCL_VARIABLES


@contextmanager
def set_unless_given(variables: Mapping[str, str]) -> Iterator[None]:
    """Return a context with these environment variables, except those that the user has set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
