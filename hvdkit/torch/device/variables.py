"""The environment variables that a constructor of torch reads, set for the time of its call only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: ProcessGroupNCCL reads these in its constructor. Its watchdog would end the process at an error of the network,
#: before hvdkit can name the rank that was lost, and so would the monitor of the watchdog. 2: abort communicators only.
NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}


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
