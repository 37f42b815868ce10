"""Horovod's questions about what there is, as its scripts and tests ask them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

from hvdkit.engine import built


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Can hvdkit work with this framework here: "torch", "tensorflow" or "keras"? verbose: accepted, as in Horovod."""
    return ext_base_name in ("torch", "tensorflow", "keras") and importlib.util.find_spec(ext_base_name) is not None


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
