"""What a build finds on this machine."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdkit.errors import LaunchError
from hvdkit.launch.check import count_cores
from hvdkit.launch.mpi import find_mpi
from hvdkit.tools.build_horovod.gpu import GpuTools, find_gpu_tools
from hvdkit.tools.build_horovod.mpicxx import MpiCompiler, find_mpicxx, read_mpicxx
from hvdkit.tools.build_horovod.versions import Frameworks, find_version, read_frameworks

_COMPILERS = ("c++", "g++", "clang++")
# Horovod is compiled for those of them that the building machine has, so a wheel needs a processor with the same.
_FEATURES = ("avx", "f16c", "fma")


@dataclass(frozen=True)
class Site:
    """Facts, none of them judged; "" and 0 are not found.

    python: the tag of its extension modules. prefix: of this environment. packages_folder: its site-packages.
    machine: architecture, and features that count. mpirun: the one that hvdrun takes; mpi_error: why there is none.
    memory_bytes: free now.
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


#: Packages that the build, or Horovod itself, imports.
PACKAGES = ("pip", "setuptools", "wheel", "cloudpickle", "packaging", "psutil", "pyyaml")


def read_site(environ: Mapping[str, str], nccl_home: str) -> Site:
    """Look at this machine and this Python environment."""
    path = environ.get("PATH", os.defpath)
    own = os.pathsep.join((os.path.join(sys.prefix, "bin"), path))
    cmake = _find_program(environ.get("HOROVOD_CMAKE", "cmake"), own)
    mpirun, mpi_error, mpi = _read_mpi(environ)
    return Site(
        frameworks=read_frameworks(),
        python=str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag),
        prefix=sys.prefix,
        packages_folder=sysconfig.get_paths()["platlib"],
        machine=" ".join((platform.machine(), *_read_features())),
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
        memory_bytes=_read_memory_bytes(),
        environ=environ,
    )


def _read_mpi(environ: Mapping[str, str]) -> tuple[str, str, MpiCompiler | None]:
    try:
        mpi = find_mpi(environ, sys.prefix)
    except LaunchError as error:
        return "", str(error), None
    path = find_mpicxx(mpi)
    return mpi.mpirun, "", read_mpicxx(mpi, path, environ) if path else None


def _find_program(name: str, path: str) -> str:
    return os.path.abspath(found) if (found := shutil.which(name, path=path)) else ""


def _find_compiler(environ: Mapping[str, str], path: str) -> str:
    """CXX if it is set, which may have options, else what CMake would take."""
    if environ.get("CXX"):
        words = shlex.split(environ["CXX"])
        return environ["CXX"] if words and shutil.which(words[0], path=path) else ""
    return next((found for name in _COMPILERS if (found := _find_program(name, path))), "")


def _read_cmake_version(cmake: str, environ: Mapping[str, str]) -> str:
    if not cmake:
        return ""
    try:
        answer = subprocess.run(
            [cmake, "--version"], env=dict(environ), capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"version\s+([\d.]+)", answer.stdout)
    return found.group(1) if found else ""


def _read_features() -> list[str]:
    flags = set(_read_line("/proc/cpuinfo", "flags").split())
    return [name for name in _FEATURES if name in flags]


def _read_memory_bytes() -> int:
    kilobytes = _read_line("/proc/meminfo", "MemAvailable").split()
    return int(kilobytes[0]) * 1024 if kilobytes else 0


def _read_line(path: str, name: str) -> str:
    """The value of the first line `name: value` of a file; "" if there is none."""
    try:
        with open(path) as file:
            for line in file:
                key, colon, value = line.partition(":")
                if colon and key.strip() == name:
                    return value
    except OSError:
        pass
    return ""
