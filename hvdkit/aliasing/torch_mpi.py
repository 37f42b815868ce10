"""What `hvdrun --mpi-backend` does in a rank: torch.distributed's backend "mpi", which wheels of torch lack, is hvdkit.

It imports nothing but waits for torch.distributed. A script that asks for "mpi" or "hvdkit" then gets hvdkit's backend,
without an import of hvdkit; torch.distributed.get_backend() says "hvdkit", and is_mpi_available() True.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from hvdkit.startup.after_import import after_import

_OURS = "hvdkit"


def rename(backend: str) -> str:
    """The backend's name, or names by device ("cpu:mpi,cuda:nccl"), with hvdkit in the place of mpi."""
    devices = [part.rpartition(":") for part in backend.split(",")]
    return ",".join(
        device + colon + (_OURS if name.strip().lower() == "mpi" else name) for device, colon, name in devices
    )


def answer(module: ModuleType) -> None:
    """Have this module, torch.distributed.distributed_c10d, know hvdkit's backend by both names."""
    kind: Any = module.__dict__["Backend"]
    plain = kind.__new__

    def make(cls: type, name: str) -> str:
        if isinstance(name, str):
            name = rename(name)
            if _OURS in name.lower():
                importlib.import_module("hvdkit.torch")  # makes it known
        named: str = plain(cls, name)
        return named

    kind.__new__ = staticmethod(make)
    module.__dict__["is_mpi_available"] = lambda: True


after_import("torch.distributed.distributed_c10d", answer)
