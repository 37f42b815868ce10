"""The stand-in for CUDA's driver and NCCL, compiled by the system's compiler: see stand_ins/cuda_nccl.c.

In a process with ROCM in its environment it is the one for HIP and RCCL. There hvdkit finds it by these libraries'
names, in the folder of LD_LIBRARY_PATH.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from cache_folder import CACHE

from hvdkit.transport.cuda import load_driver
from hvdkit.transport.gpu_driver import GpuDevice
from hvdkit.transport.nccl.groups import PLATFORMS
from hvdkit.transport.nccl.library import Library, load_nccl

#: Variable, set to 1 where the stand-in is to be that of HIP and RCCL.
_ROCM = "STAND_IN_ROCM"
SOURCE = Path(__file__).parent / "stand_ins" / "cuda_nccl.c"


def find_compiler() -> str | None:
    """The system's C compiler."""
    return shutil.which("cc") or shutil.which("gcc")


def stand_in_path() -> str:
    """The compiled stand-in of this process's platform."""
    return compile_stand_in(platform())


def platform() -> str:
    """The platform whose libraries the stand-in has in this process: "cuda" or "rocm"."""
    return "rocm" if os.environ.get(_ROCM) == "1" else "cuda"


def rocm_variables() -> dict[str, str]:
    """The environment of processes to which the stand-in is HIP and RCCL, found by name."""
    folder = CACHE / f"{Path(compile_stand_in('rocm')).stem}-names"
    folder.mkdir(exist_ok=True)
    for name in ("libamdhip64.so.6", "librccl.so.1"):
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(compile_stand_in("rocm"))
    others = os.environ.get("LD_LIBRARY_PATH")
    return {_ROCM: "1", "LD_LIBRARY_PATH": os.pathsep.join([str(folder), *([others] if others else [])])}


def open_stand_in(index: int = 0) -> GpuDevice:
    """GPU `index` of the stand-in of this process's platform."""
    return GpuDevice(load_driver(stand_in_path(), PLATFORMS[platform()][0]), index)


def load_collectives() -> Library:
    """NCCL or RCCL of the stand-in."""
    return load_nccl(stand_in_path(), PLATFORMS[platform()][1])


@functools.cache
def compile_stand_in(platform: str) -> str:
    """The path of the stand-in, in a cache that is named by its source."""
    compiler = find_compiler()
    assert compiler is not None
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = CACHE / f"{'hip_rccl' if platform == 'rocm' else 'cuda_nccl'}-{digest}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        options = ["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-shared", "-fPIC", "-pthread"]
        options += ["-DSTAND_IN_HIP"] * (platform == "rocm")
        subprocess.run([compiler, *options, "-o", str(unfinished), str(SOURCE), "-lrt"], check=True, timeout=120)
        unfinished.replace(path)  # whoever compiles at the same time makes the same file
    return str(path)


def ask_to_fail(function: str, result: int, after: int = 0) -> None:
    """Let call number `after` of a function from now on, the next one being 0, return `result`."""
    ctypes.CDLL(stand_in_path()).stand_in_fail(function.encode(), after, result)


def synchronizations() -> int:
    """How often the host has waited for a stream or an event."""
    return int(ctypes.CDLL(stand_in_path()).stand_in_synchronizations())
