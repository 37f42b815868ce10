"""A machine on which Horovod could be built, and the lines of its source that are patched, for the tests of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from hvdkit.tools.installed import Frameworks
from hvdkit_horovod.builder.plan import Plan, build_plan
from hvdkit_horovod.builder.site import PACKAGES, MpiCompiler, Site

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
    torch=st.just("") | versions((2, 4), (2, 30)),
    tensorflow=st.just("") | versions((2, 18), (2, 40)),
).filter(lambda frameworks: bool(frameworks.names))


def write_tree(tree: Path, files: dict[str, str] = RELEASED) -> Path:
    for file, text in files.items():
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).write_text(text)
    return tree


def plan_of(**changes: Any) -> Plan:
    return build_plan(replace(EVERYTHING, **changes))
