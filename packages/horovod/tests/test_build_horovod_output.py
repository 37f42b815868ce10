"""hvdkit build-horovod: what a build prints and leaves behind; a real one with `pytest -m horovod`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
from horovod_site import plan_of, write_tree
from hvdrun_job import alive
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import BuildError
from hvdkit_horovod.builder.plan import HOROVOD, Plan
from hvdkit_horovod.builder.wheel import (
    Cache,
    build_wheel,
    compile_wheel,
    describe_failure,
    download_source,
    find_first_error,
    find_percent,
    unpack,
)

# the build's output ---------------------------------------------------------------------------------------------------

GCC = """\
torch/all.h:5:2: error: #error C++17 or later compatible compiler is required to use PyTorch.
    5 | #error C++17 or later compatible compiler is required to use PyTorch.
      |  ^~~~~"""
ERRORS = {
    "gcc": GCC,
    "fatal": "/src/mpi_context.cc:3:10: fatal error: mpi.h: No such file or directory",
    "nvcc": '/src/cuda_kernels.cu(12): error: identifier "half" is undefined',
    "linker": "/usr/bin/ld: cannot find -lmpi: No such file or directory",
    "undefined": "x.cc:(.text+0x1): undefined reference to `MPI_Init'",
    "killed": "c++: fatal error: Killed signal terminated program cc1plus",
    "cmake": "CMake Error at cmake/FindNCCL.cmake:9 (message):\n  Could NOT find NCCL (missing: NCCL_LIBRARY)",
    "python": "ModuleNotFoundError: No module named 'distutils'",
}
# What follows from an error, and what only looks like one.
BEFORE = ["[  2%] Building CXX object gloo/error.cc.o", "x.cc:1:2: warning: unused error", "-- error_code: found", ""]
AFTER = [
    "y.cc:9:9: error: a later one", "make[2]: *** [x.o] Error 1", "CMake Error: later", "ERROR: Failed building wheel",
    "subprocess.CalledProcessError: Command died", "",
]  # fmt: skip


@pytest.mark.parametrize("kind", ERRORS)
@given(
    before=st.lists(st.sampled_from(BEFORE), max_size=20),
    after=st.lists(st.sampled_from(AFTER), max_size=20),
    indent=st.sampled_from(["", "  ", "      "]),
)
def test_the_first_error_is_found_with_its_lines_and_nothing_else(
    kind: str, before: list[str], after: list[str], indent: str
) -> None:
    lines = [*before, *ERRORS[kind].splitlines(), *([] if kind == "python" else after)]
    log = "\n".join(indent + line if line else line for line in lines)
    assert find_first_error(log) == ERRORS[kind]


@given(st.text())
def test_any_text_at_all_can_be_searched_for_errors(log: str) -> None:
    find_first_error(log)


def test_a_compiler_that_was_killed_gets_a_piece_of_advice() -> None:
    assert "--jobs 1" in describe_failure(ERRORS["killed"])
    assert "--jobs 1" not in describe_failure(ERRORS["gcc"])


def test_progress_is_read_from_what_make_says() -> None:
    line = "  [ 98%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o\n"
    assert find_percent(f"  [  2%] Building CXX object a.o\n{line}...") == 98
    assert find_percent("  -- Configuring done") == 0


def archive(folder: Path, setup: str) -> Path:
    """A source archive that pip can build, with the lines that are mended."""
    tree = write_tree(folder / f"horovod-{HOROVOD}")
    (tree / "setup.py").write_text(setup)
    path = folder / f"horovod-{HOROVOD}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tree, tree.name)
    return path


@pytest.fixture
def here() -> Plan:
    """A plan whose environment is the one of this process."""
    return plan_of(environ=dict(os.environ), cmake="", compiler="", mpi=None, prefix=sys.prefix)


def test_a_failing_build_ends_with_the_compilers_first_error_and_the_log(tmp_path: Path, here: Plan) -> None:
    told = [*BEFORE, *GCC.splitlines(), *AFTER * 300]
    path = archive(tmp_path, f"import sys\nprint({chr(10).join(told)!r}, flush=True)\nsys.exit(1)\n")
    cache = Cache(tmp_path / "cache")
    with pytest.raises(BuildError) as error:
        compile_wheel(here, path, cache)
    text = str(error.value)
    assert GCC in text
    assert "a later one" not in text
    assert text.endswith(f"Log: {cache.log(here)}")
    assert "a later one" in cache.log(here).read_text()
    assert cache.find_wheel(here) is None


def test_a_build_that_succeeds_leaves_a_wheel_in_the_cache_and_nothing_elsewhere(
    tmp_path: Path, here: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    setup = (
        "from pathlib import Path\nfrom setuptools import setup\n"
        "assert 'STANDARD 20' in Path('CMakeLists.txt').read_text()\n"
        f"setup(name='horovod', version='{HOROVOD}', packages=[])\n"
    )
    cache = Cache(tmp_path / "cache")
    wheel = compile_wheel(here, archive(tmp_path, setup), cache)
    assert wheel == cache.find_wheel(here)
    assert wheel.name.startswith(f"horovod-{HOROVOD}")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_interrupted_build_leaves_no_process_and_no_files(tmp_path: Path, here: Plan) -> None:
    (tmp_path / "tmp").mkdir()
    pids = tmp_path / "pids"
    compiler = f"import os, time; open({str(pids)!r}, 'a').write(str(os.getpid()) + chr(10)); time.sleep(600)"
    path = archive(tmp_path, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {compiler!r}])\n")
    program = (
        f"import os\nfrom pathlib import Path\nfrom horovod_site import plan_of\n"
        f"from hvdkit_horovod.builder.wheel import Cache, compile_wheel\n"
        f"plan = plan_of(environ=dict(os.environ), cmake='', compiler='', mpi=None, prefix={sys.prefix!r})\n"
        f"compile_wheel(plan, Path({str(path)!r}), Cache(Path({str(tmp_path / 'cache')!r})))\n"
    )
    folder = str(Path(__file__).parent)
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    build = subprocess.Popen([sys.executable, "-c", program], env=environ)
    while not pids.is_file() or not pids.read_text().endswith("\n"):
        assert build.poll() is None
        time.sleep(0.05)
    build.terminate()
    assert build.wait(60) == 128 + signal.SIGTERM
    assert list((tmp_path / "tmp").glob("hvdkit-*")) == []
    while alive(int(pids.read_text().split()[0])):  # until it has taken note of its signal
        time.sleep(0.05)


def test_an_archive_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.tar.gz").write_bytes(b"no archive")
    with pytest.raises(BuildError, match=r"broken.tar.gz cannot be unpacked"):
        unpack(tmp_path / "broken.tar.gz", tmp_path / "out")


def test_another_archive_of_that_name_is_refused_before_its_code_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    setup = f"from setuptools import setup\nsetup(name='horovod', version='{HOROVOD}')\n"
    archive(tmp_path, f"open({str(ran)!r}, 'w')\n{setup}")
    environ = {"PATH": os.environ["PATH"], "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    with pytest.raises(BuildError, match=r"(?s)could not be downloaded: it ended with status 1.*HASHES"):
        download_source(tmp_path / "source", {**environ, "PIP_FIND_LINKS": str(tmp_path)})
    assert not ran.exists()


def test_another_archive_in_the_cache_is_refused(tmp_path: Path, here: Plan) -> None:
    cache = Cache(tmp_path)
    cache.source.parent.mkdir()
    archive(cache.source.parent, "")
    with pytest.raises(BuildError, match=f"not the released source of Horovod {HOROVOD}: its SHA-256 is "):
        build_wheel(here, cache)


@pytest.mark.parametrize("kind", ["outside", "absolute", "link"])
def test_an_archive_that_reaches_outside_its_folder_is_refused(kind: str, tmp_path: Path) -> None:
    member = tarfile.TarInfo({"outside": "../out", "absolute": str(tmp_path / "out"), "link": "link"}[kind])
    if kind == "link":
        member.type, member.linkname = tarfile.SYMTYPE, str(tmp_path)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.addfile(member)
    with pytest.raises(BuildError):
        unpack(tmp_path / "a.tar.gz", tmp_path / "folder")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "folder" / "link").is_symlink()


@pytest.mark.horovod
@pytest.mark.timeout(900)
def test_horovod_is_built_installed_and_reduces_on_two_ranks() -> None:
    """The whole of it, in this very environment; minutes without the wheel in the cache, seconds with it."""
    argv = [sys.executable, "-m", "hvdkit", "build-horovod"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=880)
    assert done.returncode == 0, done.stdout
    assert "reduces on 2 ranks, with mpi, gloo" in done.stdout
    assert done.stdout.rstrip().endswith(f"Horovod {HOROVOD} is installed.")
