"""Count the GPUs of this machine, and choose the number of ranks for -np."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.gpu_vendors import NVIDIA, VENDORS, Folders, Vendor
from hvdkit.gpu_vendors import Gpu as ListedGpu
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.process import run_program

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")
_NVIDIA_SMI_S = 30.0


def choose_ranks(
    asked: int | str | None, hosts: tuple[Host, ...], *, local: bool, cores: int, environ: Mapping[str, str]
) -> int | None:
    """Choose the number of ranks for -np; None means one for each slot of the hosts.

    asked: a number, "auto", "gpu", or None without -np.
    hosts: of the job.
    local: all hosts are this machine.
    cores: number of cores of this machine.
    environ: the variables, which may hide GPUs.

    Raises LaunchError if the GPUs of the job cannot be counted here, or none is found.
    """
    if asked == "auto":
        return None if hosts else cores
    if asked != "gpu":
        assert not isinstance(asked, str)
        return asked
    if not local:
        names = ", ".join(host.name for host in hosts)
        raise LaunchError(
            f"-np gpu counts the GPUs of this machine only, and the hosts are {names}. Write the number of GPUs of "
            "each host as its slots, as -H node1:8,node2:8 or --slots-per-host 8, and leave -np out.",
            code="np-gpu-on-hosts",
        )
    return count_gpus(environ)


def count_gpus(environ: Mapping[str, str], proc: Path = _NVIDIA_DRIVER, root: Path = Path("/")) -> int:
    """Count the GPUs that a process of this machine sees, without loading a framework.

    environ: the variables, which may hide GPUs.
    proc: the folder of NVIDIA's driver with one entry for each GPU.
    root: of the folders of the other vendors' drivers.

    Raises LaunchError for none, with the inspected sources.
    """
    vendor, gpus, seen = _list_present(environ, proc, Folders.under(root))
    number = len(vendor.select(environ, gpus).gpus)
    if number < 1:
        raise LaunchError(
            f"-np gpu: this machine has no visible GPU: {seen}; {vendor.describe_selection(environ)}. Check "
            f"{vendor.program} and {vendor.variable}, or give the number of ranks: -np N.",
            code="gpu-missing",
        )
    return number


def _list_present(environ: Mapping[str, str], proc: Path, folders: Folders) -> tuple[Vendor, Sequence[ListedGpu], str]:
    """List the GPUs of this machine; returns them with their vendor, and a clause about the inspected sources."""
    present, seen = _count_nvidia(environ, proc)
    if present:
        return NVIDIA, [ListedGpu(number, "") for number in range(present)], seen
    for vendor in VENDORS:
        if vendor is not NVIDIA and (gpus := vendor.list_gpus(folders, environ)):
            return vendor, gpus, f"the kernel's files list {len(gpus)} of {vendor.name}"
    others = " or ".join(vendor.name for vendor in VENDORS if vendor is not NVIDIA)
    return NVIDIA, (), f"the kernel's files list none of {others}, {seen}"


def _count_nvidia(environ: Mapping[str, str], proc: Path) -> tuple[int, str]:
    """Count NVIDIA's GPUs of this machine; returns the number, and a clause about the sources that were inspected."""
    program = shutil.which(NVIDIA.program, path=environ.get("PATH", os.defpath))
    if program:
        hidden = {name: value for name, value in environ.items() if name not in NVIDIA.variables}
        result = run_program([program, "-L"], environ=hidden, timeout_s=_NVIDIA_SMI_S)
        if result.status == 0:
            number = sum(line.startswith("GPU ") for line in result.stdout.splitlines())
            return number, f"{program} -L lists {number}"
        seen = f"{program} -L failed ({result.ending})"
    else:
        seen = f"there is no {NVIDIA.program} on PATH"
    try:
        number = sum(1 for _ in proc.iterdir())
    except OSError:
        return 0, f"{seen}, and no {proc}"
    return number, f"{seen}, and {proc} has {number}"
