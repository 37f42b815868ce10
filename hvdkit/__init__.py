"""Data-parallel training with Horovod's API; a script says `import hvdkit.torch as hvd`.

Importing hvdkit brings in no framework and no MPI: its names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdkit.stacks import offer_stacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from hvdkit.config import Config, read_config
    from hvdkit.errors import (
        AliasError,
        BackwardInterruptedError,
        BenchError,
        BuildError,
        CheckpointError,
        CompareError,
        ConfigError,
        DuplicateNameError,
        HorovodInternalError,
        HorovodVersionMismatchError,
        HostfileError,
        HostsUpdatedInterrupt,
        HvdkitError,
        LaunchError,
        LaunchTimeoutError,
        LocalFailureError,
        MissingDependencyError,
        NotInitializedError,
        ParallelError,
        PlanMismatchError,
        ProfileError,
        RankLostError,
        RanksDisagreeError,
        ReplicasDifferError,
        SharedMemoryError,
        StateLostError,
        SubmitError,
        TooFewRanksError,
        TrackError,
        TransportError,
        WorldError,
        WrapError,
        XlaError,
    )
    from hvdkit.launch.options import LaunchOptions
    from hvdkit.launch.plan.elasticity import Elasticity

    #: Defined in hvdkit.launch.run_api, which this module may not import at its own import.
    launch: Callable[..., list[Any] | None]
    run: Callable[..., list[Any]]

__version__ = "0.1.0"

__all__ = [
    "AliasError",
    "BackwardInterruptedError",
    "BenchError",
    "BuildError",
    "CheckpointError",
    "CompareError",
    "Config",
    "ConfigError",
    "DuplicateNameError",
    "Elasticity",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostfileError",
    "HostsUpdatedInterrupt",
    "HvdkitError",
    "LaunchError",
    "LaunchOptions",
    "LaunchTimeoutError",
    "LocalFailureError",
    "MissingDependencyError",
    "NotInitializedError",
    "ParallelError",
    "PlanMismatchError",
    "ProfileError",
    "RankLostError",
    "RanksDisagreeError",
    "ReplicasDifferError",
    "SharedMemoryError",
    "StateLostError",
    "SubmitError",
    "TooFewRanksError",
    "TrackError",
    "TransportError",
    "WorldError",
    "WrapError",
    "XlaError",
    "__version__",
    "launch",
    "read_config",
    "run",
]


offer_stacks()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hvdkit' has no attribute {name!r}")
    if name == "launch":
        return importlib.import_module("hvdkit.launch")  # a module that can be called
    if name == "run":
        return importlib.import_module("hvdkit.launch.run_api").run
    if name == "LaunchOptions":
        return importlib.import_module("hvdkit.launch.options").LaunchOptions
    if name == "Elasticity":
        return importlib.import_module("hvdkit.launch.plan.elasticity").Elasticity
    home = "hvdkit.errors" if name.endswith(("Error", "Interrupt")) else "hvdkit.config"
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
