"""Find a CUDA toolkit and NCCL, and decide what Horovod does on GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.tools.build_horovod.versions import Frameworks, find_package

_NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_LIBRARIES = ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")


@dataclass(frozen=True)
class Nccl:
    """Where NCCL is.

    library: the file to link; libnccl.so.2 in the wheel, which has no libnccl.so.
    """

    include: str
    library: str


@dataclass(frozen=True)
class GpuTools:
    """What was found; "" and None are not found. looked: where NCCL was looked for."""

    cuda_home: str = ""
    nccl: Nccl | None = None
    looked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """What Horovod does on GPUs: operations NCCL, MPI or "" for none, and why."""

    operations: str
    why: str


def find_gpu_tools(environ: Mapping[str, str], nccl_home: str) -> GpuTools:
    """Look where NVIDIA, distributions and wheels put a CUDA toolkit and NCCL.

    nccl_home: where to look for NCCL, and nowhere else; "" looks everywhere.
    """
    cuda_home = next((str(home) for home in _cuda_homes(environ) if _is_cuda(home)), "")
    homes = list(dict.fromkeys([Path(nccl_home)] if nccl_home else _nccl_homes(environ, cuda_home)))
    nccl = next(filter(None, map(_find_nccl, homes)), None)
    return GpuTools(cuda_home, nccl, tuple(map(str, homes)))


def choose_gpu(asked: str, frameworks: Frameworks, tools: GpuTools) -> tuple[Gpu, list[str]]:
    """Decide what to build, and list what is missing for what was asked.

    asked: auto, none, nccl or mpi. auto takes NCCL where all of it is there, else none, and says why.
    """
    lacks = []
    if frameworks.torch and not frameworks.torch_cuda:
        lacks.append(f"torch {frameworks.torch} is a build without CUDA")
    if not tools.cuda_home:
        lacks.append("there is no CUDA toolkit (bin/nvcc with include/cuda_runtime.h)")
    if asked != "mpi" and tools.nccl is None:
        lacks.append(f"there is no NCCL (include/nccl.h with lib/libnccl.so) in {', '.join(tools.looked)}")
    if asked == "none":
        return Gpu("", "--gpu-operations none"), []
    if asked == "auto":
        return (Gpu("", "; ".join(lacks)), []) if lacks else (Gpu("NCCL", "found all that it needs"), [])
    return Gpu(asked.upper(), f"--gpu-operations {asked}"), lacks


def _cuda_homes(environ: Mapping[str, str]) -> Iterator[Path]:
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            yield Path(environ[name])
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    if nvcc:
        yield Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")


def _is_cuda(home: Path) -> bool:
    headers = ("include/cuda_runtime.h", "targets/x86_64-linux/include/cuda_runtime.h")
    return os.access(home / "bin/nvcc", os.X_OK) and any((home / header).is_file() for header in headers)


def _nccl_homes(environ: Mapping[str, str], cuda_home: str) -> Iterator[Path]:
    for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT"):
        if environ.get(name):
            yield Path(environ[name])
    # Before those of the system: torch loads this one, and two NCCLs in a process do not get on.
    for wheel in _NCCL_WHEELS:
        folder = find_package(wheel, "nvidia/nccl")
        if folder is not None:
            yield folder
    if cuda_home:
        yield Path(cuda_home)
    yield from (Path("/usr/local"), Path("/usr"))


def _find_nccl(home: Path) -> Nccl | None:
    header = home / "include" / "nccl.h"
    if not header.is_file():
        return None
    for folder in _LIBRARIES:
        for name in ("libnccl.so", "libnccl.so.2"):
            library = home / folder / name
            if library.is_file():
                return Nccl(str(header.parent), str(library))
    return None
