"""Finds a CUDA toolkit and NCCL, and problems of a build with them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.tools.installed import Frameworks, find_package, parse_numbers

#: torch loads the NCCL of its wheel, so that comes before the system's: two NCCLs in a process conflict.
NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_LIBRARIES = ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
#: Packages that contain a CUDA toolkit of some version 13, and the folder in which they assemble it.
CUDA_WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
_CUDA_WHEELS_HOME = "nvidia/cu13"
_CUDA_HEADERS = ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include")
_CUDART_VERSION = re.compile(r"^#define\s+CUDART_VERSION\s+(\d+)", re.MULTILINE)
_NCCL_VERSION = re.compile(r"^#define\s+NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Nccl:
    """An NCCL. library: the file to link; libnccl.so.2 in the wheel, which has no libnccl.so.

    version: from its header, "" if the header has none.
    """

    include: str
    library: str
    version: str = ""


@dataclass(frozen=True)
class GpuTools:
    """The CUDA toolkit and NCCL that were found; "" and None for those not found.

    cuda_home: folder of the toolkit.
    nccl: the NCCL.
    looked: folders that were searched for NCCL.
    cuda_version: version in the toolkit's header, for example "13.0".
    cuda_runtime: libcudart.so.N of wheels, which have no libcudart.so.
    looked_for_cuda: folders that were searched for CUDA.
    """

    cuda_home: str = ""
    nccl: Nccl | None = None
    looked: tuple[str, ...] = ()
    cuda_version: str = ""
    cuda_runtime: str = ""
    looked_for_cuda: tuple[str, ...] = ()


def find_gpu_tools(environ: Mapping[str, str], nccl_home: str) -> GpuTools:
    """Search the folders of NVIDIA, distributions and wheels for a CUDA toolkit and NCCL.

    nccl_home: the one folder to search for NCCL; "" for all.
    """
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    homes = [environ.get(name, "") for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    homes += [str(folder.parent.parent) for folder in ((Path(nvcc).resolve(), Path(nvcc)) if nvcc else ())]
    homes += [str(find_package(CUDA_WHEELS[0], _CUDA_WHEELS_HOME) or ""), "/usr/local/cuda"]
    cuda_homes = tuple(dict.fromkeys(filter(None, homes)))
    usable = (home for home in cuda_homes if os.access(Path(home, "bin/nvcc"), os.X_OK))
    cuda_home = next((home for home in usable if _find_header(Path(home), "cuda_runtime.h") is not None), "")
    wheels = (find_package(name, "nvidia/nccl") for name in NCCL_WHEELS)
    homes = [environ.get(name, "") for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT")]
    homes += [*(str(folder) for folder in wheels if folder is not None), cuda_home, "/usr/local", "/usr"]
    looked = tuple(dict.fromkeys([nccl_home] if nccl_home else filter(None, homes)))
    return GpuTools(
        cuda_home=cuda_home,
        nccl=next(filter(None, (_find_nccl(Path(home)) for home in looked)), None),
        looked=looked,
        cuda_version=_read_cuda_version(Path(cuda_home)) if cuda_home else "",
        cuda_runtime=_find_unlinked_runtime(Path(cuda_home)) if cuda_home else "",
        looked_for_cuda=cuda_homes,
    )


def find_lacks(frameworks: Frameworks, tools: GpuTools, *, nccl: bool) -> Iterator[tuple[str, str]]:
    """Find missing or unsuitable components of a build for GPUs: the problem, what was found, and how to install it."""
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


def _find_header(home: Path, name: str) -> Path | None:
    return next(filter(Path.is_file, (home / folder / name for folder in _CUDA_HEADERS)), None)


def _read_cuda_version(home: Path) -> str:
    """Read "13.0" from the header that has 13000; "" without a header."""
    header = _find_header(home, "cuda_runtime_api.h")
    found = _CUDART_VERSION.search(header.read_text(errors="replace")) if header is not None else None
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else ""


def _find_unlinked_runtime(home: Path) -> str:
    """Find libcudart.so.N in a lib folder without libcudart.so, as in wheels; "" in other folders."""
    if any((home / folder / "libcudart.so").exists() for folder in (*_LIBRARIES, "targets/x86_64-linux/lib")):
        return ""
    return next(map(str, sorted((home / "lib").glob("libcudart.so.*"))), "")


def _find_nccl(home: Path) -> Nccl | None:
    libraries = (home / folder / name for folder in _LIBRARIES for name in ("libnccl.so", "libnccl.so.2"))
    library = next(filter(Path.is_file, libraries), None)
    include = home / "include"
    header = include / "nccl.h"
    if library is None or not header.is_file():
        return None
    return Nccl(str(include), str(library), ".".join(_NCCL_VERSION.findall(header.read_text(errors="replace"))))
