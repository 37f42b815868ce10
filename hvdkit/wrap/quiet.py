"""Only rank 0 speaks: stdout, progress bars and log lines below warnings of the others go nowhere."""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType
from typing import Any

from hvdkit.startup.after_import import after_import


def hush(rank: int) -> None:
    """Silence this rank, if it is not the first. stderr stays, for errors."""
    if rank == 0:
        return
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what libraries write and what children print, too
    os.close(nowhere)
    logging.disable(logging.INFO)
    after_import("tqdm.std", _hide_bars)


def _hide_bars(module: ModuleType) -> None:
    made = module.tqdm.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **{**kwargs, "disable": True})

    module.tqdm.__init__ = __init__
