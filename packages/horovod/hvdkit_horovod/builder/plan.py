"""Decides how to build Horovod here: patches, the library for GPUs, variables. This file does not read the machine."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.tools.cuda_toolkit import GpuTools, find_lacks
from hvdkit.tools.installed import Frameworks, parse_numbers
from hvdkit_horovod.builder.site import INSTALL_COMPILER, INSTALL_MPI, Missing, Site

#: The last release of Horovod, to which the patches apply.
HOROVOD = "0.28.1"
_XLA = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")'
_COMPILER_BYTES = 2_500_000_000  # memory for the largest of its files
_CMAKE_LEAST, _SETUPTOOLS_BELOW = (3, 13), (81,)
_RUN_TIME = ("cloudpickle", "packaging", "psutil", "pyyaml")
# Variables that change the result of the build; the plan sets them.
_DECIDED = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_NCCL_", "HOROVOD_CUDA_HOME", "HOROVOD_SKIP_COMPILE", "CCL_ROOT")
# Variables that the user may set; their values are in the wheel's key.
_PASSED = (
    *("HOROVOD_BUILD_ARCH_FLAGS", "HOROVOD_BUILD_CUDA_CC_LIST", "HOROVOD_CPU_OPERATIONS", "HOROVOD_DEBUG"),
    *("CXXFLAGS", "CUDAFLAGS"),
)


@dataclass(frozen=True)
class Patch:
    """A line of a file to be replaced, without the blanks around it; `new` is empty to remove the line."""

    file: str
    old: str
    new: str
    why: str

    def __str__(self) -> str:
        """Return the text in the wheel's key: another text invalidates every wheel in the cache."""
        change = f"{self.old} -> {self.new}" if self.new else f"leave out {self.old}"
        return f"{self.file}: {change} ({self.why})"


@dataclass(frozen=True)
class Gpu:
    """The library that Horovod uses on GPUs.

    operations: NCCL, MPI or "" for none. why: the reason. missing: requirements of the requested library that are not
        met.
    """

    operations: str
    why: str
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The plan of a build.

    site: the machine.
    source: the archive, "" to download it.
    source_digest: digest of its content.
    standard: the C++ standard.
    patches: changes of the source.
    gpu: the library for GPUs.
    jobs: number of concurrent compilers.
    variables: variables to set for the build.
    removed: variables to remove from its environment, because they would change the result.
    """

    site: Site
    source: str
    source_digest: str
    standard: int
    patches: tuple[Patch, ...]
    gpu: Gpu
    jobs: int
    variables: dict[str, str]
    removed: tuple[str, ...]

    @property
    def bindings(self) -> dict[str, Any]:
        """Everything that a wheel depends on: versions, the patches, the variables of the build, and paths.

        Paths inside this environment are written relative to it, so that another environment finds the wheel too.
        """
        site, mpi = self.site, self.site.mpi
        passing = ("PATH", "LIBRARY_PATH", "MAKEFLAGS", "HOROVOD_CMAKE")  # they affect how it is built, not the result
        bindings = {
            "horovod": HOROVOD,
            "source": self.source_digest,
            "torch": site.frameworks.torch,
            "tensorflow": site.frameworks.tensorflow,
            "python": site.python,
            "machine": site.machine,
            "libc": site.libc,
            "mpi": [mpi.name, mpi.version, mpi.command] if mpi else [],
            "mends": [str(patch) for patch in self.patches],
            "variables": {
                **{name: site.environ[name] for name in _PASSED if site.environ.get(name)},
                **{name: value for name, value in self.variables.items() if name not in passing},
            },
        }
        if self.gpu.operations:
            nccl = site.gpu_tools.nccl
            bindings["gpu"] = [site.frameworks.torch_cuda, site.gpu_tools.cuda_version, nccl.version if nccl else ""]
        text, prefix = json.dumps(bindings), json.dumps(site.prefix)[1:-1]
        relative: dict[str, Any] = json.loads(text.replace(prefix, "{prefix}") if prefix else text)
        return relative

    @property
    def key(self) -> str:
        """The name of the wheel's folder: readable versions, and a digest of everything that the wheel depends on."""
        site = self.site
        parts = [HOROVOD, *(name + getattr(site.frameworks, name) for name in site.frameworks.names)]
        parts += [site.python.split("-x86")[0], *([f"mpi{site.mpi.version}"] if site.mpi else [])]
        parts.append(hashlib.sha256(json.dumps(self.bindings, sort_keys=True).encode()).hexdigest()[:12])
        return "_".join("".join(c if c.isalnum() or c in ".+-" else "-" for c in part) for part in parts)


def build_plan(
    site: Site, *, gpu_operations: str = "auto", jobs: int = 0, source: str = "", source_digest: str = ""
) -> Plan:
    """Decide patches, GPU operations and the variables of the build from the facts and the options.

    site: the machine.
    gpu_operations: auto, none, nccl or mpi.
    jobs: number of concurrent compilers; 0 for as many as cores and memory allow.
    source: the archive, "" to download it.
    source_digest: digest of its content.
    """
    gpu = choose_gpu(gpu_operations, site.frameworks, site.gpu_tools)
    jobs = jobs or max(1, min(site.cores, site.memory_bytes // _COMPILER_BYTES or 1))
    variables = dict(_variables(site, gpu, jobs))
    removed = tuple(name for name in sorted(site.environ) if name.startswith(_DECIDED) and name not in variables)
    standard, patches = choose_standard(site.frameworks), tuple(list_patches(site.frameworks))
    return Plan(site, source, source_digest, standard, patches, gpu, jobs, variables, removed)


def build_environment(plan: Plan) -> dict[str, str]:
    """Build the environment of the build."""
    kept = {name: value for name, value in plan.site.environ.items() if name not in plan.removed}
    return {**kept, **plan.variables}


def _variables(site: Site, gpu: Gpu, jobs: int) -> Iterator[tuple[str, str]]:
    yield "HOROVOD_WITH_MPI", "1"
    yield "HOROVOD_WITH_GLOO", "1"
    # Required by name: otherwise Horovod silently leaves out a framework whose check fails.
    for framework, name in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
        yield f"HOROVOD_{'WITH' if framework in site.frameworks.names else 'WITHOUT'}_{name}", "1"
    yield "HOROVOD_WITHOUT_MXNET", "1"
    if gpu.operations:
        yield "HOROVOD_GPU_OPERATIONS", gpu.operations
        yield "HOROVOD_CUDA_HOME", site.gpu_tools.cuda_home
        yield "CUDA_HOME", site.gpu_tools.cuda_home  # searched by torch, which Horovod queries
        if site.gpu_tools.cuda_runtime:
            libraries = [str(Path(site.gpu_tools.cuda_runtime).parent), site.environ.get("LIBRARY_PATH", "")]
            yield "LIBRARY_PATH", os.pathsep.join(filter(None, libraries))  # nvcc links with lib64
    if gpu.operations == "NCCL" and site.gpu_tools.nccl is not None:
        yield "HOROVOD_NCCL_INCLUDE", site.gpu_tools.nccl.include
        yield "HOROVOD_NCCL_LIB", str(Path(site.gpu_tools.nccl.library).parent)
        yield "HOROVOD_NCCL_LINK", "SHARED"  # the framework's own NCCL, not a second one inside Horovod
    if site.compiler:
        yield "CXX", site.compiler
    if site.cmake:
        yield "HOROVOD_CMAKE", site.cmake
    if parse_numbers(site.cmake_version) >= (4,):
        yield "CMAKE_POLICY_VERSION_MINIMUM", "3.5"  # third_party/gloo requires 2.8.12, which CMake 4 refuses
    yield "CMAKE_GENERATOR", "Unix Makefiles"  # setup.py passes options of make to the build tool
    yield "MAKEFLAGS", f"-j{jobs}"  # setup.py uses 8 by default
    # -s: without the debugging symbols a library is a tenth of its size.
    yield "LDFLAGS", " ".join(filter(None, [site.environ.get("LDFLAGS", ""), "-Wl,-s", *_run_paths(site)]))
    folders = [os.path.join(site.prefix, "bin"), site.environ.get("PATH", os.defpath)]
    if gpu.operations:  # Horovod queries the first nvcc on PATH for its GPU targets
        folders.insert(0, os.path.join(site.gpu_tools.cuda_home, "bin"))
    if site.mpi is not None:
        programs = Path(site.mpi.path).parent
        yield "MPI_HOME", str(programs.parent)
        folders.insert(0, str(programs))
    yield "PATH", os.pathsep.join(dict.fromkeys(folders))


def _run_paths(site: Site) -> Iterator[str]:
    """Yield linker options for an MPI inside this environment, relative to the folder of Horovod's libraries.

    CMake sets its path as well, but an absolute one, which is wrong in every other environment. The frameworks'
    libraries are in memory before Horovod's are loaded.
    """
    if site.mpi is None or not Path(site.packages_folder).is_relative_to(site.prefix):
        return
    home = os.path.join(site.packages_folder, "horovod", "torch")  # TensorFlow's folder has the same depth
    options = [word for word in shlex.split(site.mpi.command) if word.startswith("-L/")]
    for folder in dict.fromkeys(option.removeprefix("-L") for option in options):
        if Path(folder).is_relative_to(site.prefix):
            yield f"-Wl,-rpath,$ORIGIN/{os.path.relpath(folder, home)}"


def choose_standard(frameworks: Frameworks) -> int:
    """Choose the C++ standard that the headers of all frameworks need."""
    return 20 if parse_numbers(frameworks.tensorflow) >= (2, 20) else 17


def list_patches(frameworks: Frameworks) -> Iterator[Patch]:
    """List the patches for these frameworks; both get the same C++ standard, as they share Horovod's core."""
    standard = choose_standard(frameworks)
    needing = "tensorflow" if standard == 20 else next(iter(frameworks.names), "torch")
    why = f"{needing} {getattr(frameworks, needing)} needs C++{standard}"
    for file, old, is_compiled in (
        ("CMakeLists.txt", 14, True),
        ("horovod/torch/CMakeLists.txt", 14, frameworks.torch),
        ("horovod/tensorflow/CMakeLists.txt", 17, frameworks.tensorflow),
    ):
        if is_compiled and old < standard:
            yield Patch(file, f"set(CMAKE_CXX_STANDARD {old})", f"set(CMAKE_CXX_STANDARD {standard})", why)
    if frameworks.tensorflow:
        why = "TensorFlow's wheels lack a header that it needs; operations inside XLA are the loss"
        yield Patch("horovod/tensorflow/CMakeLists.txt", _XLA, "", why)


def check_site(plan: Plan) -> Iterator[Missing]:
    """Check the facts about this machine; reads nothing more."""
    site, packages = plan.site, plan.site.packages
    if not site.frameworks.names:
        yield Missing("a framework", "neither torch nor TensorFlow is installed", "pip install 'hvdkit[torch]'")
    if not site.compiler:
        yield Missing("a C++ compiler", _not_found(site.environ, "CXX", "c++, g++ or clang++"), INSTALL_COMPILER)
    if not site.make:
        yield Missing("make", "there is none on PATH", "apt install make, dnf install make or conda install make")
    if not site.cmake:
        yield Missing("cmake", _not_found(site.environ, "HOROVOD_CMAKE", "cmake"), "pip install cmake")
    elif parse_numbers(site.cmake_version) < _CMAKE_LEAST:
        found = f"{site.cmake} is version {site.cmake_version or 'unknown'}; at least 3.13 is needed"
        yield Missing("cmake", found, "pip install cmake")
    if site.mpi_error:
        yield Missing("an MPI", site.mpi_error.partition(". ")[0], INSTALL_MPI)
    elif site.mpi is None:
        yield Missing("mpicxx", f"there is none beside {site.mpirun}, which hvdrun uses", INSTALL_MPI)
    for name, install in (("pip", f"{sys.executable} -m ensurepip"), ("wheel", "pip install wheel")):
        if not packages.get(name):
            yield Missing(name, "it is not installed", install)
    setuptools = packages.get("setuptools", "")
    if not setuptools or parse_numbers(setuptools) >= _SETUPTOOLS_BELOW:
        yield Missing("setuptools below 81", f"{setuptools or 'none'} is installed", "pip install 'setuptools<81'")
    if absent := [name for name in _RUN_TIME if not packages.get(name)]:
        found = f"{', '.join(absent)} not installed"
        yield Missing("packages that Horovod imports", found, f"pip install {' '.join(absent)}")
    yield from plan.gpu.missing


def _not_found(environ: Mapping[str, str], variable: str, names: str) -> str:
    value = environ.get(variable)
    return f"{variable}={value!r} is no program" if value else f"there is no {names} on PATH"


def choose_gpu(asked: str, frameworks: Frameworks, tools: GpuTools) -> Gpu:
    """Choose the library for GPUs.

    asked: auto, none, nccl or mpi. auto chooses NCCL if nothing is missing, else none.
    """
    option = f"--gpu-operations {asked}"
    if asked == "none":
        return Gpu("", option)
    missing = tuple(Missing(option, *lack) for lack in find_lacks(frameworks, tools, nccl=asked != "mpi"))
    if asked != "auto":
        return Gpu(asked.upper(), option, missing)
    return Gpu("", "; ".join(each.found for each in missing)) if missing else Gpu("NCCL", "all requirements were found")
