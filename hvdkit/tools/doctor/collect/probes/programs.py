"""Probes that may crash, hang or take long, each in a process of its own: `python programs.py NAME [ARGUMENT]`."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import socket
import statistics
import sys
import time
from typing import Any

_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_PARTS = ("mpi", "gloo", "nccl", "cuda", "rocm", "ccl", "ddl")
_TIMES = 5


def load_mpi() -> None:
    """Load the MPI library that mpi4py finds, print its version, then start it and print its thread level."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        _print(error=_in_one_line(error))
        return
    mpi: Any = MPI
    library = " ".join(mpi.Get_library_version().replace("\0", " ").split())
    version, subversion = mpi.Get_version()
    _print(library=library, standard=f"{version}.{subversion}", path=_find_libmpi())
    mpi.Init_thread(mpi.THREAD_MULTIPLE)
    level = mpi.Query_thread()
    names = {getattr(mpi, f"THREAD_{name}"): f"MPI_THREAD_{name}" for name in _LEVELS}
    _print(threads=names.get(level, str(level)))
    mpi.Finalize()


def _find_libmpi() -> str:
    try:
        with open("/proc/self/maps") as file:
            found = re.search(r"(/\S*/libmpi(?:_cray|_intel|ch)?\S*\.so\S*)$", file.read(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1) if found else ""


def count_ranks() -> None:
    """Print the size of the world: two ranks of it show whether launcher and library belong together."""
    from mpi4py import MPI

    _print(size=MPI.COMM_WORLD.Get_size())


def load_horovod(framework: str) -> None:
    """Load Horovod's library for torch or tensorflow; print its built-in features, or why it cannot be loaded."""
    try:
        module: Any = importlib.import_module(f"horovod.{framework}")
        parts = [name for name in _PARTS if getattr(module, f"{name}_built")()]
    except Exception as error:  # the error is the result, whatever Horovod or the framework raises
        _print(error=f"{type(error).__name__}: {_in_one_line(error)}")
        return
    _print(parts=parts)


def try_horovod(framework: str, *parts: str) -> None:
    """Sum rank + 1 over 2 ranks with Horovod; exits with the error of that, or the features that it lacks."""
    numbers, hvd = importlib.import_module(framework), importlib.import_module(f"horovod.{framework}")
    hvd.init()
    value = hvd.rank() + 1.0
    tensor = numbers.full((5,), value) if framework == "torch" else numbers.fill([5], value)
    total = hvd.allreduce(tensor, op=hvd.Sum).numpy().tolist()
    if hvd.size() != 2 or total != [3.0] * 5:
        sys.exit(f"rank {hvd.rank()} of {hvd.size()} got {total}, not 3.0")
    if lacking := [name for name in parts if not getattr(hvd, f"{name}_built")()]:
        sys.exit(f"it was built without {lacking}")
    hvd.shutdown()


def load_nccl(named: str) -> None:
    """Print the newest CUDA that the driver runs, then path and version of libnccl; neither needs a GPU.

    named: HVDKIT_NCCL_LIBRARY.
    """
    from hvdkit.transport.nccl.library import find_library

    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            _print(driver_cuda=f"{number.value // 1000}.{number.value % 1000 // 10}")
    except (OSError, AttributeError):
        pass  # no driver; nvidia-smi reports that too
    path = find_library(named)
    try:
        result = ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        _print(error=_in_one_line(error))
        return
    code = number.value
    factor = 10000 if code >= 10000 else 1000  # before NCCL 2.9
    if result == 0:
        _print(path=named or find_library(), version=f"{code // factor}.{code % factor // 100}.{code % 100}")
    else:
        _print(error=f"ncclGetVersion returned {result} in {path}")


def time_allreduce(count: str) -> None:
    """Print this rank's facts; on rank 0 also the seconds of a sum of `count` float32, as in training."""
    import numpy as np

    from hvdkit.config import read_config, read_environment
    from hvdkit.engine.startup import open_world
    from hvdkit.gpu_vendors import Folders
    from hvdkit.tools.doctor.collect.vendor_gpus import describe_selection
    from hvdkit.transport.buffer import as_buffer

    world, transport, _ = open_world(read_config())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    selection = describe_selection(read_environment(), Folders())
    _print(rank=world.rank, size=world.size, host=socket.gethostname(), cores=cores, **selection)
    buffer = as_buffer(np.ones(int(count), np.float32))
    seconds = []
    for _ in range(_TIMES + 1):
        transport.barrier()
        began = time.perf_counter()
        transport.allreduce(buffer, "sum")
        seconds.append(time.perf_counter() - began)
    if world.rank == 0:
        # The value of the setting: "shared_memory" of SharedMemoryTransport.
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(transport).__name__.removesuffix("Transport")).lower()
        _print(seconds=statistics.median(seconds[1:]), transport=name)
    transport.close()


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _print(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")  # in one write: several ranks share a pipe
    sys.stdout.flush()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
