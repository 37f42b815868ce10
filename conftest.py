"""What all tests share: seeds, and a report that says what they ran on."""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_folder import CACHE
from engines import ENGINES, choose, has_both, ranks_of, require_horovod
from hypothesis import settings
from package_entry_points import write_metadata
from rank_job import find_mpirun
from ranks import close_all
from tiers import begins_early, find_other_sizes, group_of, marks_of

ROOT = Path(__file__).parent

# `benchmarks` is found here; hvdkit, where it is installed, before that.
sys.path.append(str(ROOT))

# Processes of the tests import the packages from their folders, and start quickly.
_METADATA = Path(tempfile.mkdtemp(prefix="hvdkit-metadata-"))
atexit.register(shutil.rmtree, _METADATA, ignore_errors=True)
_PROJECTS = sorted(ROOT.glob("packages/*/pyproject.toml"))
for project in _PROJECTS:
    write_metadata(project, _METADATA)
sys.path.append(str(_METADATA))
_PATHS = [ROOT / "tests" / "support" / "quick_start", *(project.parent for project in _PROJECTS), _METADATA]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, _PATHS), os.environ.get("PYTHONPATH")]))

# A shell has what it starts in the background ignore Ctrl-C, and processes of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


# What XLA has compiled for JAX, in any process, is read: nearly half of the time of its tests.
for name, value in {
    "JAX_COMPILATION_CACHE_DIR": str(CACHE / f"jax-{_version('jaxlib')}"),
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(200 * 2**20),  # with a size there is a lock, too
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="module", autouse=True)
def end_world() -> Iterator[None]:
    """A world that the tests of a file have left in this process is ended: those of the next file find none."""
    yield
    runtime = sys.modules.get("hvdkit.engine.runtime")
    if runtime is not None and runtime.is_initialized():
        runtime.shutdown()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the adapters' tests on both engines."""
    if has_both(metafunc.module.__name__):
        metafunc.parametrize("engine", ENGINES, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite in parallel where pytest-xdist is installed: half of the tests wait for processes."""
    if hasattr(config, "workerinput"):
        # A process of pytest-xdist reads the command line again, which has no --dist.
        config.option.loadgroup = config.workerinput["hvdkit_loadgroup"]
        return
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if whole and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses = len(os.sched_getaffinity(0)) + 1
        config.option.dist = "loadgroup"
        config.option.loadscopereorder = False  # by begins_early(), not by the number of a group's tests


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist (its WorkerController) whether tests stay with their group."""
    node.workerinput["hvdkit_loadgroup"] = node.config.option.dist == "loadgroup"


# Before pytest-xdist, which reads the groups, and before pytest, which reads the marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what says nothing about Horovod's core; what the same ranks do comes one after the other."""
    items[:], dropped = choose(items)
    items.sort(key=lambda item: (not begins_early(item), *ranks_of(item)))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    for item in find_other_sizes(items):
        item.add_marker("slow")
    for item in items:
        for name in marks_of(item):
            item.add_marker(name)
        if config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group(group_of(item)))


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


#: Files of tests/unit that start programs nevertheless, to read what they print. The list may only get shorter.
_START_PROGRAMS = {"test_available", "test_commands", "test_horovod_flags", "test_launchers", "test_peers"}


@pytest.fixture(autouse=True)
def _unit_tests_start_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of tests/unit that starts a process fails: it belongs to tests/jobs."""

    def refuse(*args: Any, **options: Any) -> None:
        pytest.fail(f"a test of tests/unit starts a process ({args[:1]}); move it to tests/jobs")

    with pytest.MonkeyPatch.context() as patch:
        if "unit" in request.path.parts and request.path.stem not in _START_PROGRAMS:
            for module, name in ((subprocess, "Popen"), (os, "fork"), (os, "posix_spawn")):
                patch.setattr(module, name, refuse)
        yield


@pytest.fixture(autouse=True, scope="session")
def _ranks_end() -> Iterator[None]:
    """End the ranks that wait for more work."""
    yield
    close_all()
