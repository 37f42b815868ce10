"""Find a CUDA toolkit and NCCL, and choose the library that Horovod uses on GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.tools.build_horovod.versions import Frameworks, find_package

#: torch loads the NCCL of its wheel, so that goes before the system's: two NCCLs in a process conflict.
NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_LIBRARIES = ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
_CUDA_HEADERS = ("include/cuda_runtime.h", "targets/x86_64-linux/include/cuda_runtime.h")


@dataclass(frozen=True)
class Nccl:
    """Where NCCL is. library: the file to link; libnccl.so.2 in the wheel, which has no libnccl.so."""

    include: str
    library: str


@dataclass(frozen=True)
class GpuTools:
    """What was found; "" and None if nothing was. looked: the folders that were searched for NCCL."""

    cuda_home: str = ""
    nccl: Nccl | None = None
    looked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """What Horovod uses on GPUs: operations NCCL, MPI or "" for none, and why."""

    operations: str
    why: str


def find_gpu_tools(environ: Mapping[str, str], nccl_home: str) -> GpuTools:
    """Search where NVIDIA, distributions and wheels put a CUDA toolkit and NCCL.

    nccl_home: the one folder to search for NCCL; "" for all.
    """
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    homes = [environ.get(name, "") for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    homes += [str(Path(nvcc).resolve().parent.parent) if nvcc else "", "/usr/local/cuda"]
    cuda_home = next((home for home in homes if home and _is_cuda(Path(home))), "")
    wheels = (find_package(name, "nvidia/nccl") for name in NCCL_WHEELS)
    homes = [environ.get(name, "") for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT")]
    homes += [*(str(folder) for folder in wheels if folder is not None), cuda_home, "/usr/local", "/usr"]
    looked = tuple(dict.fromkeys([nccl_home] if nccl_home else filter(None, homes)))
    return GpuTools(cuda_home, next(filter(None, (_find_nccl(Path(home)) for home in looked)), None), looked)


def choose_gpu(asked: str, frameworks: Frameworks, tools: GpuTools) -> tuple[Gpu, list[str]]:
    """Choose what to build, and list what is missing for it.

    asked: auto, none, nccl or mpi. auto takes NCCL if nothing is missing, else none; the reason is what is missing.
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
        return (Gpu("", "; ".join(lacks)), []) if lacks else (Gpu("NCCL", "all requirements were found"), [])
    return Gpu(asked.upper(), f"--gpu-operations {asked}"), lacks


def _is_cuda(home: Path) -> bool:
    return os.access(home / "bin/nvcc", os.X_OK) and any((home / header).is_file() for header in _CUDA_HEADERS)


def _find_nccl(home: Path) -> Nccl | None:
    libraries = (home / folder / name for folder in _LIBRARIES for name in ("libnccl.so", "libnccl.so.2"))
    library = next(filter(Path.is_file, libraries), None)
    include = home / "include"
    return Nccl(str(include), str(library)) if library is not None and (include / "nccl.h").is_file() else None
