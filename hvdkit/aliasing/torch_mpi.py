"""`hvdrun --mpi-backend` in a rank: hvdkit is torch.distributed's backend "mpi", which wheels of torch do not have.

It patches torch.distributed when the script imports it. A script that requests "mpi" or "hvdkit" then gets hvdkit's
backend without importing hvdkit. torch.distributed.get_backend() returns "hvdkit", and is_mpi_available() True.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from hvdkit.startup.after_import import after_import

_OURS = "hvdkit"


def rename(backend: str) -> str:
    """Replace mpi by hvdkit in a backend's name, or in names by device ("cpu:mpi,cuda:nccl")."""
    devices = [part.rpartition(":") for part in backend.split(",")]
    return ",".join(
        device + colon + (_OURS if name.strip().lower() == "mpi" else name) for device, colon, name in devices
    )


def answer(module: ModuleType) -> None:
    """Patch the module torch.distributed.distributed_c10d to accept both names of hvdkit's backend."""
    kind: Any = module.__dict__["Backend"]
    plain = kind.__new__

    def make(cls: type, name: str) -> str:
        if isinstance(name, str):
            name = rename(name)
            if _OURS in name.lower():
                importlib.import_module("hvdkit.torch")  # registers the backend
        named: str = plain(cls, name)
        return named

    kind.__new__ = staticmethod(make)
    module.__dict__["is_mpi_available"] = lambda: True


after_import("torch.distributed.distributed_c10d", answer)
