"""Choose the library that Horovod uses on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvdkit.tools.cuda_toolkit import CUDA_WHEELS, NCCL_WHEELS, GpuTools
from hvdkit.tools.installed import Frameworks, parse_numbers


@dataclass(frozen=True)
class Missing:
    """A requirement that is not met: what was found in its place, and how to install it."""

    name: str
    found: str
    install: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found}. Install it: {self.install}"


@dataclass(frozen=True)
class Gpu:
    """What Horovod uses on GPUs: operations NCCL, MPI or "" for none, and why. missing: of what was asked for."""

    operations: str
    why: str
    missing: tuple[Missing, ...] = ()


def choose_gpu(asked: str, frameworks: Frameworks, tools: GpuTools) -> Gpu:
    """Choose what to build.

    asked: auto, none, nccl or mpi. auto takes NCCL if nothing is missing, else none; the reason is what is missing.
    """
    option = f"--gpu-operations {asked}"
    if asked == "none":
        return Gpu("", option)
    missing = tuple(Missing(option, *lack) for lack in _find_lacks(frameworks, tools, nccl=asked != "mpi"))
    if asked != "auto":
        return Gpu(asked.upper(), option, missing)
    return Gpu("", "; ".join(each.found for each in missing)) if missing else Gpu("NCCL", "all requirements were found")


def _find_lacks(frameworks: Frameworks, tools: GpuTools, *, nccl: bool) -> Iterator[tuple[str, str]]:
    """Find what is missing or does not fit, and what to do about it."""
    wanted = frameworks.torch_cuda
    if frameworks.torch and not wanted:
        yield (
            f"torch {frameworks.torch} is a build without CUDA",
            "a CUDA build of torch, as PyPI's wheels for Linux are",
        )
    if not tools.cuda_home:
        version = f"=={wanted}.*" if parse_numbers(wanted)[:1] == (13,) else ""
        packages = " ".join(f"'{name}{version}'" if version else name for name in CUDA_WHEELS)
        yield (
            "there is no CUDA toolkit (bin/nvcc with include/cuda_runtime.h) in "
            f"{', '.join(tools.looked_for_cuda) or 'any of the usual places'}",
            f"CUDA {wanted or 'of the version of your framework'}, and set CUDA_HOME to it; for CUDA 13 also "
            f"pip install {packages}",
        )
    elif wanted and tools.cuda_version and parse_numbers(wanted)[0] != parse_numbers(tools.cuda_version)[0]:
        yield (
            f"torch {frameworks.torch} is for CUDA {wanted}, and {tools.cuda_home} is CUDA {tools.cuda_version}",
            f"a toolkit of CUDA {wanted}, and set CUDA_HOME to it; or torch for CUDA {tools.cuda_version}",
        )
    if nccl and tools.nccl is None:
        package = NCCL_WHEELS[1 if parse_numbers(wanted)[:1] == (12,) else 0]
        yield (
            f"there is no NCCL (include/nccl.h with lib/libnccl.so) in {', '.join(tools.looked)}",
            f"pip install {package}, or name the folder of another one with --nccl-home or HOROVOD_NCCL_HOME",
        )
