"""What the cluster tests need of the machine, and the command that provides it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("openssh-server", "iproute2", "slurm-wlm", "munge", "libpmix2", "libfaketime", "sshfs")
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


def missing_for_faults() -> str:
    """Why the clock of a host and its file systems cannot be tampered with, and what to do; "" if they can."""
    absent = _missing(["sshfs"])
    if absent:
        return absent
    if not libfaketime():
        return _say(["libfaketime.so.1"])
    if not os.access("/dev/fuse", os.W_OK):
        return "no /dev/fuse here. Run: modprobe fuse; in a container: docker run --privileged"
    return ""


def libfaketime() -> str:
    """The library that shifts a process's clock; "" if it is not installed."""
    return next(map(str, Path("/usr/lib").glob("*-linux-gnu/faketime/libfaketimeMT.so.1")), "")


def pmix_folder() -> Path | None:
    """The folder with the system's libpmix, where Slurm looks for it."""
    return next((path.parent for path in Path("/usr/lib").glob("*-linux-gnu/pmix2/lib/libpmix.so.2")), None)


def _missing(programs: Iterable[str]) -> str:
    absent = [program for program in programs if find(program) is None]
    return _say(absent) if absent else ""


def _say(absent: Iterable[str]) -> str:
    return f"the cluster tests need {', '.join(absent)}. Run: {INSTALL}"
