"""Decide how Horovod is built here. Nothing in this file reads the machine or changes it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.tools.build_horovod.gpu import Gpu, choose_gpu
from hvdkit.tools.build_horovod.site import Site
from hvdkit.tools.build_horovod.source import HOROVOD, Patch, choose_standard, list_patches
from hvdkit.tools.installed import parse_numbers

_COMPILER_BYTES = 2_500_000_000  # the largest of its files took so much
# Variables that change what is built, and which the plan decides.
_DECIDED = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_NCCL_", "HOROVOD_CUDA_HOME", "HOROVOD_SKIP_COMPILE", "CCL_ROOT")
# Those that may be set by hand, and go into the name of the wheel.
_PASSED = (
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_DEBUG",
    "CXXFLAGS",
    "CUDAFLAGS",
)


@dataclass(frozen=True)
class Plan:
    """How Horovod is built.

    source: the archive, "" to download it; source_digest: of its content. jobs: compilers at a time.
    variables: to be set for the build. removed: to be removed from its environment, as they would change the result.
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
        """Everything that a wheel depends on: versions, the patches, the variables of the build, and places.

        Places inside this environment are written relative to it: the wheel finds them in another one too.
        """
        site, mpi = self.site, self.site.mpi
        passing = ("PATH", "LIBRARY_PATH", "MAKEFLAGS", "HOROVOD_CMAKE")  # how it is built, not what
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
        """A name for the wheel's folder: the versions, to be read, and a digest of all that the wheel depends on."""
        site = self.site
        parts = [HOROVOD, *(name + getattr(site.frameworks, name) for name in site.frameworks.names)]
        parts += [site.python.split("-x86")[0], *([f"mpi{site.mpi.version}"] if site.mpi else [])]
        parts.append(hashlib.sha256(json.dumps(self.bindings, sort_keys=True).encode()).hexdigest()[:12])
        return "_".join("".join(c if c.isalnum() or c in ".+-" else "-" for c in part) for part in parts)


def build_plan(
    site: Site, *, gpu_operations: str = "auto", jobs: int = 0, source: str = "", source_digest: str = ""
) -> Plan:
    """Decide patches, GPU operations and the variables of the build from what was found and asked for.

    gpu_operations: auto, none, nccl or mpi. jobs: 0 for as many as cores and memory allow.
    """
    gpu = choose_gpu(gpu_operations, site.frameworks, site.gpu_tools)
    jobs = jobs or max(1, min(site.cores, site.memory_bytes // _COMPILER_BYTES or 1))
    variables = dict(_variables(site, gpu, jobs))
    removed = tuple(name for name in sorted(site.environ) if name.startswith(_DECIDED) and name not in variables)
    standard, patches = choose_standard(site.frameworks), tuple(list_patches(site.frameworks))
    return Plan(site, source, source_digest, standard, patches, gpu, jobs, variables, removed)


def build_environment(plan: Plan) -> dict[str, str]:
    """Build the environment that the build runs in."""
    kept = {name: value for name, value in plan.site.environ.items() if name not in plan.removed}
    return {**kept, **plan.variables}


def _variables(site: Site, gpu: Gpu, jobs: int) -> Iterator[tuple[str, str]]:
    yield "HOROVOD_WITH_MPI", "1"
    yield "HOROVOD_WITH_GLOO", "1"
    # Asked for by name: otherwise a framework whose check fails is left out of the wheel without a word.
    for framework, name in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
        yield f"HOROVOD_{'WITH' if framework in site.frameworks.names else 'WITHOUT'}_{name}", "1"
    yield "HOROVOD_WITHOUT_MXNET", "1"
    if gpu.operations:
        yield "HOROVOD_GPU_OPERATIONS", gpu.operations
        yield "HOROVOD_CUDA_HOME", site.gpu_tools.cuda_home
        yield "CUDA_HOME", site.gpu_tools.cuda_home  # where torch, which Horovod asks, looks for it
        if site.gpu_tools.cuda_runtime:
            libraries = [str(Path(site.gpu_tools.cuda_runtime).parent), site.environ.get("LIBRARY_PATH", "")]
            yield "LIBRARY_PATH", os.pathsep.join(filter(None, libraries))  # nvcc links with lib64
    if gpu.operations == "NCCL" and site.gpu_tools.nccl is not None:
        yield "HOROVOD_NCCL_INCLUDE", site.gpu_tools.nccl.include
        yield "HOROVOD_NCCL_LIB", str(Path(site.gpu_tools.nccl.library).parent)
        yield "HOROVOD_NCCL_LINK", "SHARED"  # the one that the framework has loaded, not a second one inside Horovod
    if site.compiler:
        yield "CXX", site.compiler
    if site.cmake:
        yield "HOROVOD_CMAKE", site.cmake
    if parse_numbers(site.cmake_version) >= (4,):
        yield "CMAKE_POLICY_VERSION_MINIMUM", "3.5"  # third_party/gloo asks for 2.8.12, which CMake 4 refuses
    yield "CMAKE_GENERATOR", "Unix Makefiles"  # setup.py gives the build tool options of make
    yield "MAKEFLAGS", f"-j{jobs}"  # setup.py takes 8 without asking
    # -s: without the debugging symbols a library is a tenth of its size.
    yield "LDFLAGS", " ".join(filter(None, [site.environ.get("LDFLAGS", ""), "-Wl,-s", *_run_paths(site)]))
    folders = [os.path.join(site.prefix, "bin"), site.environ.get("PATH", os.defpath)]
    if gpu.operations:  # Horovod asks the first nvcc there for the GPUs that it compiles for
        folders.insert(0, os.path.join(site.gpu_tools.cuda_home, "bin"))
    if site.mpi is not None:
        programs = Path(site.mpi.path).parent
        yield "MPI_HOME", str(programs.parent)
        folders.insert(0, str(programs))
    yield "PATH", os.pathsep.join(dict.fromkeys(folders))


def _run_paths(site: Site) -> Iterator[str]:
    """Linker options by which an MPI inside this environment is found from where Horovod's libraries will be.

    CMake gives its path as well, but an absolute one, which holds in no other environment. The frameworks' libraries
    are in memory before Horovod's are loaded.
    """
    if site.mpi is None or not Path(site.packages_folder).is_relative_to(site.prefix):
        return
    home = os.path.join(site.packages_folder, "horovod", "torch")  # that of TensorFlow is as deep
    options = [word for word in shlex.split(site.mpi.command) if word.startswith("-L/")]
    for folder in dict.fromkeys(option.removeprefix("-L") for option in options):
        if Path(folder).is_relative_to(site.prefix):
            yield f"-Wl,-rpath,$ORIGIN/{os.path.relpath(folder, home)}"
