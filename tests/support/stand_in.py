"""The stand-in for CUDA's driver and NCCL, compiled by the system's compiler: see stand_ins/cuda_nccl.c."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from cache_folder import CACHE

SOURCE = Path(__file__).parent / "stand_ins" / "cuda_nccl.c"


def find_compiler() -> str | None:
    """The system's C compiler."""
    return shutil.which("cc") or shutil.which("gcc")


@functools.cache
def stand_in_path() -> str:
    """The compiled stand-in, in a cache that is named by its source."""
    compiler = find_compiler()
    assert compiler is not None
    path = CACHE / f"cuda_nccl-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        options = ["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *options, "-o", str(unfinished), str(SOURCE), "-lrt"], check=True, timeout=120)
        unfinished.replace(path)  # whoever compiles at the same time makes the same file
    return str(path)


def ask_to_fail(function: str, result: int, after: int = 0) -> None:
    """Let call number `after` of a function from now on, the next one being 0, return `result`."""
    ctypes.CDLL(stand_in_path()).stand_in_fail(function.encode(), after, result)


def synchronizations() -> int:
    """How often the host has waited for a stream or an event."""
    return int(ctypes.CDLL(stand_in_path()).stand_in_synchronizations())
