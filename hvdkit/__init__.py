"""Data-parallel training with Horovod's API; a script says `import hvdkit.torch as hvd`.

Importing hvdkit brings in no framework and no MPI: its names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdkit.config import Config, read_config
    from hvdkit.errors import (
        BackwardInterruptedError,
        BuildError,
        ConfigError,
        DuplicateNameError,
        HorovodInternalError,
        HorovodVersionMismatchError,
        HostfileError,
        HostsUpdatedInterrupt,
        HvdkitError,
        LaunchError,
        MissingDependencyError,
        NotInitializedError,
        PlanMismatchError,
        RankLostError,
        SharedMemoryError,
        SubmitError,
        TransportError,
        WorldError,
        WrapError,
        XlaError,
    )

__version__ = "0.1.0"

__all__ = [
    "BackwardInterruptedError",
    "BuildError",
    "Config",
    "ConfigError",
    "DuplicateNameError",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostfileError",
    "HostsUpdatedInterrupt",
    "HvdkitError",
    "LaunchError",
    "MissingDependencyError",
    "NotInitializedError",
    "PlanMismatchError",
    "RankLostError",
    "SharedMemoryError",
    "SubmitError",
    "TransportError",
    "WorldError",
    "WrapError",
    "XlaError",
    "__version__",
    "read_config",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hvdkit' has no attribute {name!r}")
    home = "hvdkit.errors" if name.endswith(("Error", "Interrupt")) else "hvdkit.config"
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
