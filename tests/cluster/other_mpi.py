"""Another MPI from its wheel, in an environment of its own: two MPIs in one have the same names for their programs."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from cache_folder import CACHE
from cluster.lab import ROOT


def find_wheel(package: str) -> Path:
    """Find the wheel of the tested version in the cache, or download it; raises RuntimeError if that cannot be done."""
    constraints = (ROOT / "constraints.txt").read_text()
    version = re.findall(rf"^{package}==(\S+)$", constraints, re.MULTILINE)[0]
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(CACHE.glob(pattern)):
        CACHE.mkdir(parents=True, exist_ok=True)
        words = ["pip", "download", "--quiet", "--no-deps", f"--dest={CACHE}", f"{package}=={version}"]
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"the tests of {package} need its wheel. Run: {' '.join(words)}\n{done.stderr}")
    return next(CACHE.glob(pattern))


def make_python(folder: Path, package: str = "mpich") -> Path:
    """Make an environment that has this MPI, and everything else from this one; returns its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, *install, find_wheel(package)], check=True, timeout=120)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    here = sysconfig.get_path("purelib")
    (folder / "lib" / name / "site-packages" / "below.pth").write_text(f"{here}\n")
    return python
