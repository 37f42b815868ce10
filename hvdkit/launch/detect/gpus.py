"""Count the GPUs of this machine, and choose the number of ranks for -np."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.process import run_program
from hvdkit.visible_gpus import read_visible

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
    environ: the variables, for CUDA_VISIBLE_DEVICES.

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


def count_gpus(environ: Mapping[str, str], proc: Path = _NVIDIA_DRIVER) -> int:
    """Count the GPUs that CUDA shows to a process of this machine, without loading a framework.

    proc: the driver's directory with one entry for each GPU. Raises LaunchError for none, with the inspected sources.
    """
    present, seen = _count_present(environ, proc)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    number = len(read_visible(visible, [""] * present).gpus)
    if number < 1:
        limit = "CUDA_VISIBLE_DEVICES is not set" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
        raise LaunchError(
            f"-np gpu: this machine has no visible GPU: {seen}; {limit}. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or "
            "give the number of ranks: -np N.",
            code="gpu-missing",
        )
    return number


def _count_present(environ: Mapping[str, str], proc: Path) -> tuple[int, str]:
    """Count the GPUs of this machine; returns the number, and a clause about the sources that were inspected."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if program:
        hidden = {name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        result = run_program([program, "-L"], environ=hidden, timeout_s=_NVIDIA_SMI_S)
        if result.status == 0:
            number = sum(line.startswith("GPU ") for line in result.stdout.splitlines())
            return number, f"{program} -L lists {number}"
        seen = f"{program} -L failed ({result.ending})"
    else:
        seen = "there is no nvidia-smi on PATH"
    try:
        number = sum(1 for _ in proc.iterdir())
    except OSError:
        return 0, f"{seen}, and no {proc}"
    return number, f"{seen}, and {proc} has {number}"
