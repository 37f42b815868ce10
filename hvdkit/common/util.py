"""Horovod's questions about what there is, as its scripts and tests ask them."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hvdkit.engine import built
from hvdkit.errors import HorovodVersionMismatchError

__all__ = [
    "HorovodVersionMismatchError",
    "ccl_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "mpi_built",
    "nccl_built",
]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Can hvdkit work with this framework here: "torch", "tensorflow" or "keras"? verbose: accepted, as in Horovod."""
    return ext_base_name in ("torch", "tensorflow", "keras") and importlib.util.find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Does this framework see a GPU: "torch" or "tensorflow"? Imports the framework. verbose: accepted, as in Horovod.

    Raises ValueError for another name.
    """
    if ext_base_name not in ("torch", "tensorflow"):
        raise ValueError(f"gpu_available({ext_base_name!r}): the frameworks are 'torch' and 'tensorflow'.")
    if not extension_available(ext_base_name):
        return False
    framework: Any = importlib.import_module(ext_base_name)
    if ext_base_name == "torch":
        return bool(framework.cuda.is_available())
    return bool(framework.config.list_physical_devices("GPU"))


def mpi_built(verbose: bool = False) -> bool:
    """See hvd.mpi_built()."""
    return built.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """See hvd.gloo_built()."""
    return built.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """See hvd.nccl_built()."""
    return built.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """See hvd.ddl_built()."""
    return built.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """See hvd.ccl_built()."""
    return built.ccl_built()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set variables of the environment within the context, or unset those that are None."""
    before = {name: os.environ.get(name) for name in kwargs}
    _set(kwargs)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
