"""The GPU that a rank measures on: its presence, its clock, its name and its memory."""

from __future__ import annotations

import socket

import torch

import hvdkit.torch as hvd
from hvdkit.errors import BenchError
from hvdkit.gpu_vendors import AMD, NVIDIA
from hvdkit.tools.bench.report import CPU
from hvdkit.tools.bench.timing import HOST_CLOCK, Clock, EventClock


def take_device(device: str) -> None:
    """Make this rank's GPU the current device, which "cuda" means from then on; after init(). No effect for "cpu".

    Raises BenchError on a rank without a GPU.
    """
    if device == CPU:
        return
    if not torch.cuda.is_available():
        kind = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        has = torch.version.hip or torch.version.cuda
        build = f"is for {kind} and sees none" if has else "is a build without CUDA and HIP"
        vendor = AMD if torch.version.hip else NVIDIA
        raise BenchError(
            f"--device cuda: no GPU for rank {hvd.rank()} on {socket.gethostname()}: torch {torch.__version__} {build}."
            f" Check {vendor.program}, {vendor.variable} and the build of torch, or measure with --device cpu."
        )
    torch.cuda.set_device(hvd.local_device())


def find_clock(device: str) -> Clock:
    """Return the clock for work on this device."""
    return HOST_CLOCK if device == CPU else EventClock(torch.cuda)


def describe_gpu(device: str) -> dict[str, str]:
    """Return this rank's GPU, and the number of ranks on it, for the report; nothing for "cpu". Collective."""
    if device == CPU:
        return {}
    ranks = _count_ranks()
    return {"GPU": torch.cuda.get_device_name() + (f" shared by {ranks} ranks" if ranks > 1 else "")}


def read_memory(device: str, *, emptied: bool = False) -> int:
    """Return the bytes of GPU memory in use by all libraries, divided by the GPU's ranks; 0 on the host. Collective.

    emptied: exclude the cache of torch's allocator, which is as large as its largest use so far.
    """
    if device == CPU:
        return 0
    if emptied:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    hvd.barrier()  # all ranks that share the GPU have emptied their caches
    free, total = torch.cuda.mem_get_info()
    hvd.barrier()
    return int(total - free) // _count_ranks()


def _count_ranks() -> int:
    """Count the ranks on this rank's GPU; collective."""
    gpu = socket.gethostname(), str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return hvd.allgather_object(gpu).count(gpu)
