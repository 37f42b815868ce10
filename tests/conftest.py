"""What all tests share: seeds, and a report that says what they ran on."""

from __future__ import annotations

import importlib.metadata
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from rank_job import find_mpirun
from ranks import close_all

# Times on a busy machine say nothing about the code.
settings.register_profile("hvdkit", deadline=None)
settings.load_profile("hvdkit")


def pytest_report_header() -> list[str]:
    """Versions and cores, for whoever reads a log of a failure elsewhere."""
    versions = [f"{name} {_version(name)}" for name in ("numpy", "mpi4py", "torch", "tensorflow", "keras")]
    try:
        mpirun = " ".join(find_mpirun())
    except FileNotFoundError:
        mpirun = "no mpirun"
    return [", ".join(versions), f"{len(os.sched_getaffinity(0))} cores, {mpirun}"]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same random numbers in each test, whichever run before it."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def _ranks_end() -> Iterator[None]:
    """End the ranks that wait for more work."""
    yield
    close_all()
