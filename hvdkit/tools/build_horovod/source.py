"""Get Horovod's source, and lay it out for the build."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.tools.build_horovod.release import HOROVOD

_TIMEOUT_S = 600.0


def download_source(folder: Path, environ: Mapping[str, str]) -> Path:
    """Let pip get the archive from whichever index it is configured for.

    Raises BuildError with what pip said.
    """
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
    argv += ["--disable-pip-version-check", "-d", str(folder), f"horovod=={HOROVOD}"]
    try:
        done = subprocess.run(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        said = done.stderr.strip() or done.stdout.strip()
    except subprocess.TimeoutExpired:
        said = f"nothing within {_TIMEOUT_S:.0f} s"
    found = folder / f"horovod-{HOROVOD}.tar.gz"
    if not found.is_file():
        raise BuildError(
            f"Horovod's source could not be had; pip said:\n{said}\nWithout a way to a package index get the file "
            f"{found.name} elsewhere and give it with --source."
        )
    return found


def read_digest(path: str) -> str:
    """Compute the SHA-256 of an archive; BuildError if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise BuildError(f"--source {path} cannot be read: {error.strerror}.") from None


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive and find the folder with setup.py, at most one level down."""
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(folder, filter="data")
            else:
                tar.extractall(folder)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise BuildError(f"{archive} cannot be unpacked: {error}. Get it again.") from None
    found = sorted((*folder.glob("setup.py"), *folder.glob("*/setup.py")))
    if len(found) != 1:
        raise BuildError(
            f"{archive} has {len(found)} files setup.py instead of one: it is not Horovod's source archive."
        )
    return found[0].parent
