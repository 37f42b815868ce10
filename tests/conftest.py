"""What all tests share: seeds, and a report that says what they ran on."""

from __future__ import annotations

import importlib.metadata
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engines import ENGINES, choose, has_both, ranks_of, require_horovod, says_it_again
from hypothesis import settings
from rank_job import find_mpirun
from ranks import close_all

# `benchmarks` is found here; hvdkit, where it is installed, before that.
sys.path.append(str(Path(__file__).parents[1]))

# All processes that the tests start are to start quickly.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).with_name("quick_start")), os.environ.get("PYTHONPATH")])
)

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the adapters' tests on both engines."""
    if has_both(metafunc.module.__name__):
        metafunc.parametrize("engine", ENGINES, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what says nothing about Horovod's core; what the same ranks do comes one after the other."""
    items[:], dropped = choose(items)
    items.sort(key=ranks_of)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    for item in filter(says_it_again, items):
        item.add_marker("slow")


@pytest.fixture(autouse=True, scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The engine of the ranks that a test starts; they are told by the environment."""
    name: str = getattr(request, "param", "native")
    if name == "horovod":
        require_horovod()
    with pytest.MonkeyPatch.context() as patch:
        if name != "native":
            patch.setenv("HVDKIT_ENGINE", name)
        yield name


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
