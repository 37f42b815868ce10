"""Open MPI 4 from Debian's packages, in a folder that stands over /usr on the lab's hosts only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.lab import Lab

#: What openmpi-bin needs beyond Slurm's packages. 5 MB.
PACKAGES = (
    "openmpi-bin openmpi-common libopenmpi3 libfabric1 libucx0 libpsm-infinipath1 libpsm2-2 libibverbs1 librdmacm1 "
    "libnl-3-200 libnl-route-3-200 libmunge2 libze1"
).split()


def unpack(folder: Path) -> Path:
    """Unpack the packages; returns what is to stand over /usr. Raises RuntimeError if they cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hvdkit" / "tests" / "openmpi4"
    if len(list(cache.glob("*.deb"))) < len(PACKAGES):
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["apt-get", "download", *PACKAGES], cwd=cache, capture_output=True, text=True, timeout=200, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the tests of Open MPI 4 need packages of Debian 12: {done.stderr}")
    for package in cache.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True, timeout=60)
    (folder / "usr" / "bin" / "mpirun").symlink_to("orterun")
    return folder / "usr"


@contextmanager
def on_all_hosts(lab: Lab, usr: Path) -> Iterator[None]:
    """Have every host find Open MPI 4 where Debian installs it."""
    try:
        for host in lab.names:
            done = lab.run(host, ["mount", "-t", "overlay", "-o", f"lowerdir={usr}:/usr", "overlay", "/usr"])
            assert done.returncode == 0, done.stderr
        yield
    finally:
        for host in lab.names:
            lab.run(host, ["umount", "--lazy", "/usr"])


def make_python(folder: Path) -> str:
    """Make an environment that has all of this one but its MPI; returns its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = Path(sys.prefix, "lib", name, "site-packages")
    (folder / "lib" / name / "site-packages" / "below.pth").write_text(f"{site}\n")
    return str(folder / "bin" / "python")
