"""Get Horovod's source, and lay it out for the build."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from hvdkit.errors import BuildError
from hvdkit.tools.build_horovod.release import HOROVOD, SOURCE_SHA256

_TIMEOUT_S = 600.0


def download_source(folder: Path, environ: Mapping[str, str]) -> Path:
    """Let pip get the archive from whichever index it is configured for.

    pip runs the archive's setup.py to read its metadata, so pip itself checks the hash, before that.
    Raises BuildError with what pip said.
    """
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
    argv += ["--disable-pip-version-check", "--require-hashes", "-d", str(folder), "-r"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(f"horovod=={HOROVOD} --hash=sha256:{SOURCE_SHA256}\n")
        requirements.flush()
        said = _run_pip([*argv, requirements.name], environ)
    found = folder / f"horovod-{HOROVOD}.tar.gz"
    if not found.is_file():
        raise BuildError(
            f"Horovod's source could not be had; pip said:\n{said}\nWithout a way to a package index get the file "
            f"{found.name} elsewhere and give it with --source."
        )
    check_source(found)
    return found


def _run_pip(argv: list[str], environ: Mapping[str, str]) -> str:
    """Run pip and return what it said last."""
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
    except subprocess.TimeoutExpired:
        return f"nothing within {_TIMEOUT_S:.0f} s"
    return done.stderr.strip() or done.stdout.strip()


def check_source(archive: Path) -> None:
    """Raise BuildError unless an archive is the released one, byte by byte."""
    digest = read_digest(str(archive))
    if digest != SOURCE_SHA256:
        raise BuildError(
            f"{archive} is not the source of Horovod {HOROVOD} as it was released: its SHA-256 is {digest} and should "
            f"be {SOURCE_SHA256}. Remove the file and try again; --source FILE builds another archive that you trust."
        )


def read_digest(path: str) -> str:
    """Compute the SHA-256 of an archive; BuildError if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise BuildError(f"{path} cannot be read: {error.strerror}.") from None


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive and find the folder with setup.py, at most one level down."""
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(folder, filter="data")
            else:
                _check_members(tar)  # Python 3.10.11, 3.11.3 and older have no filter
                tar.extractall(folder)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise BuildError(f"{archive} cannot be unpacked: {error}. Get it again.") from None
    found = sorted((*folder.glob("setup.py"), *folder.glob("*/setup.py")))
    if len(found) != 1:
        raise BuildError(
            f"{archive} has {len(found)} files setup.py instead of one: it is not Horovod's source archive."
        )
    return found[0].parent


def _check_members(tar: tarfile.TarFile) -> None:
    """Raise TarError unless all members are files and folders below the folder that they are unpacked to."""
    for member in tar.getmembers():
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is no file or folder below the one that it is unpacked to")
