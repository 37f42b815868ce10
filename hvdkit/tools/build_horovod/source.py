"""Horovod's source: download and check it, unpack it, and patch it for newer frameworks."""

from __future__ import annotations

import hashlib
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.launch.process import run_program
from hvdkit.tools.installed import Frameworks, parse_numbers

#: The last release of Horovod, for which the patches are, and the hash of its archive on PyPI.
HOROVOD = "0.28.1"
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_TIMEOUT_S = 600.0
_XLA = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")'


@dataclass(frozen=True)
class Patch:
    """One line of one file to be replaced, without the blanks around it; `new` is empty to remove the line."""

    file: str
    old: str
    new: str
    why: str

    def __str__(self) -> str:
        """Part of the wheel's key: another text makes every wheel in the cache useless."""
        change = f"{self.old} -> {self.new}" if self.new else f"leave out {self.old}"
        return f"{self.file}: {change} ({self.why})"


def choose_standard(frameworks: Frameworks) -> int:
    """Choose the C++ standard that the headers of all frameworks need."""
    return 20 if parse_numbers(frameworks.tensorflow) >= (2, 20) else 17


def list_patches(frameworks: Frameworks) -> Iterator[Patch]:
    """List the patches for these frameworks; both get the same C++ standard, as they share Horovod's core."""
    standard = choose_standard(frameworks)
    needing = "tensorflow" if standard == 20 else next(iter(frameworks.names), "torch")
    present = {"CMakeLists.txt": 14, "horovod/torch/CMakeLists.txt": 14, "horovod/tensorflow/CMakeLists.txt": 17}
    for file, old in present.items():
        framework = file.split("/")[1] if "/" in file else ""
        if old < standard and (not framework or framework in frameworks.names):
            line, why = "set(CMAKE_CXX_STANDARD {})", f"{needing} {getattr(frameworks, needing)} needs C++{standard}"
            yield Patch(file, line.format(old), line.format(standard), why)
    if frameworks.tensorflow:
        why = "TensorFlow's wheels lack a header that it needs; operations inside XLA are the loss"
        yield Patch("horovod/tensorflow/CMakeLists.txt", _XLA, "", why)


def apply_patches(tree: Path, patches: Sequence[Patch]) -> None:
    """Change the files below `tree`. Raises BuildError for a patch that does not find its line exactly once."""
    for patch in patches:
        path = tree / patch.file
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        places = [number for number, line in enumerate(lines) if line.strip() == patch.old]
        if len(places) != 1:
            raise BuildError(
                f"The source in {tree} cannot be patched: {patch.file} has the line {patch.old!r} {len(places)} times, "
                f"instead of once. Use the unchanged release {HOROVOD}, or compile your source by its own instructions."
            )
        lines[places[0]] = lines[places[0]].replace(patch.old, patch.new) if patch.new else ""
        path.write_text("".join(lines))


def download_source(folder: Path, environ: Mapping[str, str]) -> None:
    """Download the archive with pip, from the index that pip is configured for.

    pip runs the archive's setup.py to read its metadata, so pip itself checks the hash before that.
    Raises BuildError with pip's output.
    """
    argv = [*PIP, "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes"]
    argv += ["-d", str(folder), "-r", "/dev/stdin"]
    text = f"horovod=={HOROVOD} --hash=sha256:{SOURCE_SHA256}\n"
    result = run_program(argv, environ=environ, timeout_s=_TIMEOUT_S, text=text)
    archive = folder / f"horovod-{HOROVOD}.tar.gz"
    if not archive.is_file():
        raise BuildError(
            f"Horovod's source could not be downloaded: {result.ending}. The output of pip:\n"
            f"{result.stderr.strip() or result.stdout.strip()}\nOn a host without a package index download "
            f"{archive.name} elsewhere and pass it with --source."
        )


def check_source(archive: Path) -> None:
    """Raise BuildError unless an archive is the released one, byte by byte."""
    digest = read_digest(archive)
    if digest != SOURCE_SHA256:
        raise BuildError(
            f"{archive} is not the released source of Horovod {HOROVOD}: its SHA-256 is {digest} and should be "
            f"{SOURCE_SHA256}. Remove the file and try again; --source FILE builds another archive that you trust."
        )


def read_digest(archive: Path) -> str:
    """Compute the SHA-256 of an archive; BuildError if it cannot be read."""
    try:
        return hashlib.sha256(archive.read_bytes()).hexdigest()
    except OSError as error:
        raise BuildError(f"{archive} cannot be read: {error.strerror}. Check the path.") from None


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive and return the folder of its setup.py, at most one level down."""
    if not hasattr(tarfile, "data_filter"):
        raise BuildError(
            f"Python {sys.version.split()[0]} cannot unpack archives safely. Use 3.10.12, 3.11.4 or newer."
        )
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise BuildError(f"{archive} cannot be unpacked: {error}. Download it again.") from None
    files = sorted((*folder.glob("setup.py"), *folder.glob("*/setup.py")))
    if len(files) != 1:
        raise BuildError(f"{archive} has {len(files)} files setup.py, not one: it is not Horovod's source archive.")
    return files[0].parent
