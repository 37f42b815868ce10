"""What the cluster tests need of the machine, and the command that provides it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("openssh-server", "iproute2", "slurm-wlm", "munge", "libpmix2")
INSTALL = f"apt-get install --no-install-recommends {' '.join(PACKAGES)}"

HOST_PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip", "tc", "unshare", "nsenter")
SLURM_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")


def find(program: str) -> str | None:
    """Find a program, also where only root looks."""
    return shutil.which(program, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


@functools.cache
def missing_for_hosts() -> str:
    """Why no hosts can be made here, and what to do; "" if they can."""
    if os.geteuid() != 0:
        return "the cluster tests need root, to make network namespaces. Run: sudo bash .ci/run"
    problem = _missing(HOST_PROGRAMS)
    if problem:
        return problem
    words = "unshare --net --uts --ipc --pid --mount --fork --mount-proc mount -t tmpfs tmpfs /mnt"
    tried = subprocess.run(words.split(), capture_output=True, text=True, timeout=20)
    if tried.returncode:
        return (
            f"the cluster tests need namespaces, and {tried.stderr.strip()}. "
            "In a container run: docker run --privileged"
        )
    return ""


def missing_for_slurm() -> str:
    """Why there can be no Slurm here, and what to do; "" if there can."""
    return missing_for_hosts() or _missing(SLURM_PROGRAMS) or ("" if pmix_folder() else _say(["libpmix.so.2"]))


def pmix_folder() -> Path | None:
    """The folder with the system's libpmix, where Slurm looks for it."""
    return next((path.parent for path in Path("/usr/lib").glob("*-linux-gnu/pmix2/lib/libpmix.so.2")), None)


def _missing(programs: Iterable[str]) -> str:
    absent = [program for program in programs if find(program) is None]
    return _say(absent) if absent else ""


def _say(absent: Iterable[str]) -> str:
    return f"the cluster tests need {', '.join(absent)}. Run: {INSTALL}"
