"""Silence ranks other than 0: discard their stdout, progress bars and log lines below warnings."""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType
from typing import Any

from hvdkit.startup.after_import import after_import


def silence_other_ranks(rank: int) -> None:
    """Silence this rank unless it is rank 0. stderr stays open for errors."""
    if rank == 0:
        return
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # discards the output of C libraries and child processes too
    os.close(nowhere)
    logging.disable(logging.INFO)
    after_import("tqdm.std", _hide_bars)


def _hide_bars(module: ModuleType) -> None:
    made = module.tqdm.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **{**kwargs, "disable": True})

    module.tqdm.__init__ = __init__
