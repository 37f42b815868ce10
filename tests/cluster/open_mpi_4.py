"""Open MPI 4 from Debian's packages, in a folder that stands over /usr on the lab's hosts only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cluster import debian

#: What openmpi-bin needs beyond Slurm's packages. 5 MB.
PACKAGES = (
    "openmpi-bin openmpi-common libopenmpi3 libfabric1 libucx0 libpsm-infinipath1 libpsm2-2 libibverbs1 librdmacm1 "
    "libnl-3-200 libnl-route-3-200 libmunge2 libze1"
).split()


def unpack(folder: Path) -> Path:
    """Unpack the packages; returns what is to stand over /usr. Raises RuntimeError if they cannot be had."""
    usr = debian.unpack("openmpi4", PACKAGES, folder)
    (usr / "bin" / "mpirun").symlink_to("orterun")
    return usr


def make_python(folder: Path) -> str:
    """Make an environment that has all of this one but its MPI; returns its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = Path(sys.prefix, "lib", name, "site-packages")
    (folder / "lib" / name / "site-packages" / "below.pth").write_text(f"{site}\n")
    return str(folder / "bin" / "python")
