"""Debian's packages without installing them: unpacked into a folder that stands over /usr on the lab's hosts only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cache_folder import CACHE
from cluster.lab import Lab


def unpack(name: str, packages: Sequence[str], folder: Path) -> Path:
    """Unpack packages into a folder; returns what is to stand over /usr.

    name: of their folder in the cache.
    Raises RuntimeError if they cannot be had.
    """
    cache = CACHE / name
    if len(list(cache.glob("*.deb"))) < len(packages):
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["apt-get", "download", *packages], cwd=cache, capture_output=True, text=True, timeout=200, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the tests of {name} need packages of Debian 12: {done.stderr}")
    for package in cache.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True, timeout=60)
    return folder / "usr"


@contextmanager
def over_usr(lab: Lab, usr: Path) -> Iterator[None]:
    """Have every host find what was unpacked where Debian installs it."""
    try:
        for host in lab.names:
            done = lab.run(host, ["mount", "-t", "overlay", "-o", f"lowerdir={usr}:/usr", "overlay", "/usr"])
            assert done.returncode == 0, done.stderr
        yield
    finally:
        for host in lab.names:
            lab.run(host, ["umount", "--lazy", "/usr"])
