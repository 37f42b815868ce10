"""hvdkit build-horovod: what it decides."""

from __future__ import annotations

import itertools
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from horovod_site import EVERYTHING, FRAMEWORKS, RELEASED, XLA, plan_of, write_tree
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import BuildError
from hvdkit.tools.cuda_toolkit import GpuTools, Nccl, find_gpu_tools
from hvdkit.tools.installed import Frameworks, parse_numbers, parse_torch_cuda
from hvdkit_horovod.builder.plan import (
    HOROVOD,
    build_environment,
    build_plan,
    check_site,
    choose_gpu,
    choose_standard,
    list_patches,
)
from hvdkit_horovod.builder.site import MpiCompiler
from hvdkit_horovod.builder.wheel import Cache, apply_patches, link_libraries, open_cache


def read_standard(tree: Path, file: str) -> int:
    lines = [line.strip() for line in (tree / file).read_text().splitlines()]
    return next(int(line[-3:-1]) for line in lines if line.startswith("set(CMAKE_CXX_STANDARD "))


# patches --------------------------------------------------------------------------------------------------------------


@given(FRAMEWORKS)
def test_every_framework_gets_the_standard_that_its_headers_want(frameworks: Frameworks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = write_tree(Path(folder))
        apply_patches(tree, list(list_patches(frameworks)))
        common = read_standard(tree, "CMakeLists.txt")
        assert common == choose_standard(frameworks)
        assert common == (20 if parse_numbers(frameworks.tensorflow) >= (2, 20) else 17)
        if frameworks.torch:
            assert read_standard(tree, "horovod/torch/CMakeLists.txt") == common
        if frameworks.tensorflow:
            assert read_standard(tree, "horovod/tensorflow/CMakeLists.txt") == common
        assert (XLA in (tree / "horovod/tensorflow/CMakeLists.txt").read_text()) == (not frameworks.tensorflow)
        assert 'GLOO_CMAKE "set(CMAKE_CXX_STANDARD 17)' in (tree / "CMakeLists.txt").read_text()


@pytest.mark.parametrize(
    ("torch", "tensorflow", "standard"), [("2.13.0", "", 17), ("", "2.21.0", 20), ("2.13.0", "2.21.0", 20)]
)
def test_the_standards_of_today(torch: str, tensorflow: str, standard: int) -> None:
    assert choose_standard(Frameworks(torch, "", tensorflow)) == standard


def test_a_source_that_is_patched_already_is_refused(tmp_path: Path) -> None:
    patches = list(list_patches(EVERYTHING.frameworks))
    apply_patches(write_tree(tmp_path), patches)
    with pytest.raises(BuildError, match=r"CMakeLists.txt has the line .* 0 times.*unchanged release"):
        apply_patches(tmp_path, patches)


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)\n" * 2, "2 times"),
        ("horovod/tensorflow/CMakeLists.txt", f"set(CMAKE_CXX_STANDARD 17)\n# {XLA}\n", "xla_mpi_ops.cc.* 0 times"),
    ],
)
def test_a_patch_that_does_not_apply_once_is_an_error(file: str, text: str, told: str, tmp_path: Path) -> None:
    write_tree(tmp_path, {**RELEASED, file: text})
    with pytest.raises(BuildError, match=told):
        apply_patches(tmp_path, list(list_patches(EVERYTHING.frameworks)))


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
    plan = build_plan(replace(EVERYTHING, cores=cores, memory_bytes=memory), jobs=asked)
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
    keys.append(replace(plan_of(), patches=()).key)
    keys.append(build_plan(EVERYTHING, source="a.tar.gz", source_digest="0123").key)
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
    assert cache.find_wheel(plan_of()) is None
    kept = cache.add_wheel(plan_of(), wheel)
    assert cache.find_wheel(plan_of()) == kept
    assert kept.name == wheel.name
    assert kept.read_bytes() == b"wheel"
    assert cache.find_wheel(plan_of(python="cpython-312")) is None


# GPUs -----------------------------------------------------------------------------------------------------------------

CUDA_TORCH = Frameworks("2.13.0", "13.0")
ALL_GPU = GpuTools("/usr/local/cuda", Nccl("/nccl/include", "/nccl/lib/libnccl.so.2"), ("/nccl",))
#: Of a CPU build of torch, no CUDA toolkit, no NCCL.
CURES = ("a CUDA build of torch", "CUDA_HOME", "--nccl-home")


def test_nccl_is_taken_where_everything_is_there_and_nowhere_else() -> None:
    assert choose_gpu("auto", CUDA_TORCH, ALL_GPU).operations == "NCCL"
    assert choose_gpu("none", CUDA_TORCH, ALL_GPU).operations == ""
    for frameworks, tools, lack in (
        (Frameworks("2.13.0+cpu"), ALL_GPU, "without CUDA"),
        (CUDA_TORCH, replace(ALL_GPU, cuda_home=""), "no CUDA toolkit"),
        (CUDA_TORCH, replace(ALL_GPU, nccl=None), "no NCCL"),
    ):
        gpu = choose_gpu("auto", frameworks, tools)
        assert (gpu.operations, gpu.missing) == ("", ())
        assert lack in gpu.why
        gpu = choose_gpu("nccl", frameworks, tools)
        assert gpu.operations == "NCCL"
        assert [lack in each.found for each in gpu.missing] == [True]


def test_nccl_asked_for_in_vain_is_a_missing_part() -> None:
    plan = build_plan(EVERYTHING, gpu_operations="nccl")
    parts = [each for each in check_site(plan) if each.name == "--gpu-operations nccl"]
    assert [(part.found.split(" in ")[0], cure in part.install) for part, cure in zip(parts, CURES, strict=True)] == [
        ("torch 2.13.0+cpu is a build without CUDA", True),
        ("there is no CUDA toolkit (bin/nvcc with include/cuda_runtime.h)", True),
        ("there is no NCCL (include/nccl.h with lib/libnccl.so)", True),
    ]


def test_a_cure_names_the_packages_of_torchs_cuda() -> None:
    missing = choose_gpu("nccl", CUDA_TORCH, GpuTools()).missing
    assert "'nvidia-cuda-nvcc==13.0.*'" in missing[0].install
    assert "nvidia-nccl-cu13" in missing[1].install
    assert "nvidia-nccl-cu12" in choose_gpu("nccl", Frameworks("2.6.0", "12.4"), GpuTools()).missing[1].install


@pytest.mark.parametrize(("torch", "toolkit", "fits"), [("13.0", "13.2", True), ("12.4", "13.0", False)])
def test_the_toolkit_has_the_cuda_of_torch(torch: str, toolkit: str, fits: bool) -> None:
    found = choose_gpu("nccl", Frameworks("2.13.0", torch), replace(ALL_GPU, cuda_version=toolkit)).missing
    differs = "torch 2.13.0 is for CUDA 12.4, and /usr/local/cuda is CUDA 13.0"
    assert [lack.found for lack in found] == ([] if fits else [differs])


def test_the_wheels_of_cuda_and_nccl_are_found_and_linked(tmp_path: Path) -> None:
    files = {
        "cuda/bin/nvcc": "",
        "cuda/include/cuda_runtime.h": "",
        "cuda/include/cuda_runtime_api.h": "#define CUDART_VERSION  13020\n",
        "cuda/lib/libcudart.so.13": "",
        "nccl/include/nccl.h": "#define NCCL_MAJOR 2\n#define NCCL_MINOR 29\n#define NCCL_PATCH 7\n",
        "nccl/lib/libnccl.so.2": "",
    }
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
        (tmp_path / file).chmod(0o755)
    environ = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": ""}
    tools = find_gpu_tools(environ, str(tmp_path / "nccl"))
    assert tools.cuda_home == str(tmp_path / "cuda")
    assert tools.cuda_version == "13.2"
    assert tools.nccl == Nccl(str(tmp_path / "nccl/include"), str(tmp_path / "nccl/lib/libnccl.so.2"), "2.29.7")
    plan = plan_of(frameworks=CUDA_TORCH, gpu_tools=tools)
    variables = plan.variables
    assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert variables["HOROVOD_NCCL_LIB"] == str(tmp_path / "nccl/lib")
    assert variables["HOROVOD_CUDA_HOME"] == variables["CUDA_HOME"] == str(tmp_path / "cuda")
    assert variables["PATH"].split(os.pathsep).index(str(tmp_path / "cuda/bin")) <= 1, "before another nvcc"
    assert variables["LIBRARY_PATH"] == str(tmp_path / "cuda/lib")
    links = link_libraries(plan, Cache(tmp_path / "cache"))
    assert links.keys() == {"HOROVOD_NCCL_LIB", "CMAKE_LIBRARY_PATH"}
    assert Path(links["HOROVOD_NCCL_LIB"], "libnccl.so").resolve() == tmp_path / "nccl/lib/libnccl.so.2"
    assert Path(links["CMAKE_LIBRARY_PATH"], "libcudart.so").resolve() == tmp_path / "cuda/lib/libcudart.so.13"
    assert find_gpu_tools(environ, str(tmp_path / "elsewhere")).nccl is None


def test_a_toolkit_that_is_whole_needs_no_links(tmp_path: Path) -> None:
    tools = replace(ALL_GPU, nccl=Nccl("/usr/include", "/usr/lib/libnccl.so"))
    plan = plan_of(frameworks=CUDA_TORCH, gpu_tools=tools)
    assert "LIBRARY_PATH" not in plan.variables
    assert link_libraries(plan, Cache(tmp_path)) == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes", [{"cuda_version": "13.1"}, {"nccl": Nccl("/nccl/include", "/nccl/lib/libnccl.so.2", "2.30.7")}]
)
def test_a_wheel_with_nccl_is_of_its_versions_of_cuda_and_nccl(changes: dict[str, Any]) -> None:
    keys = {plan_of(frameworks=CUDA_TORCH, gpu_tools=tools).key for tools in (ALL_GPU, replace(ALL_GPU, **changes))}
    assert len(keys) == 2


def test_torch_tells_its_cuda_in_a_file() -> None:
    assert parse_torch_cuda("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip = None\n") == "13.0"
    assert parse_torch_cuda("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n") == ""
