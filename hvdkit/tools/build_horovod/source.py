"""Horovod's source: download and check it, unpack it, and patch it for newer frameworks."""

from __future__ import annotations

import hashlib
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.launch.process import run_program
from hvdkit.tools.build_horovod.versions import HOROVOD, Frameworks, parse_numbers

#: Of the release's archive on PyPI, horovod-0.28.1.tar.gz.
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_TIMEOUT_S = 600.0

# Framework -> from which version on its headers need which C++ standard.
_STANDARDS = {"torch": (((2, 1), 17),), "tensorflow": (((2, 10), 17), ((2, 20), 20))}
# File of the release -> the C++ standard that it sets, and the framework that it is compiled for ("": any).
_FILES = {
    "CMakeLists.txt": (14, ""),
    "horovod/torch/CMakeLists.txt": (14, "torch"),
    "horovod/tensorflow/CMakeLists.txt": (17, "tensorflow"),
}
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


def choose_standard(frameworks: Frameworks) -> tuple[int, str]:
    """Choose the C++ standard, the highest that a framework needs, and name that framework; (14, "") if none does."""
    needs = [
        (standard, f"{name} {getattr(frameworks, name)}")
        for name in frameworks.names
        for least, standard in _STANDARDS[name]
        if parse_numbers(getattr(frameworks, name)) >= least
    ]
    return max([(14, ""), *needs], key=lambda need: need[0])


def choose_patches(frameworks: Frameworks) -> tuple[Patch, ...]:
    """Choose the patches for these frameworks; both get the same C++ standard, as they share Horovod's core."""
    standard, needed_by = choose_standard(frameworks)
    old, new = "set(CMAKE_CXX_STANDARD {})", f"set(CMAKE_CXX_STANDARD {standard})"
    patches = [
        Patch(file, old.format(present), new, f"{needed_by} needs C++{standard}")
        for file, (present, framework) in _FILES.items()
        if present < standard and (not framework or framework in frameworks.names)
    ]
    if frameworks.tensorflow:
        why = "TensorFlow's wheels lack a header that it needs; operations inside XLA are the loss"
        patches.append(Patch("horovod/tensorflow/CMakeLists.txt", _XLA, "", why))
    return tuple(patches)


def apply_patches(tree: Path, patches: Sequence[Patch]) -> None:
    """Change the files below `tree`; none of them unless each patch finds its line exactly once.

    Raises BuildError with every patch that does not apply.
    """
    texts: dict[Path, list[str]] = {}
    problems = []
    for patch in patches:
        path = tree / patch.file
        lines = texts.setdefault(path, path.read_text().splitlines(keepends=True) if path.is_file() else [])
        places = [number for number, line in enumerate(lines) if line.strip() == patch.old]
        if len(places) == 1:
            line = lines[places[0]]
            lines[places[0]] = line.replace(patch.old, patch.new) if patch.new else ""
        else:
            problems.append(f"{patch.file} has the line {patch.old!r} {len(places)} times")
    if problems:
        raise BuildError(
            f"The patches do not apply to the source in {tree}: {'; '.join(problems)}, instead of once. Use the "
            f"unchanged release {HOROVOD}, or compile your source by its own instructions."
        )
    for path, lines in texts.items():
        path.write_text("".join(lines))


def download_source(folder: Path, environ: Mapping[str, str]) -> Path:
    """Download the archive with pip, from the index that pip is configured for.

    pip runs the archive's setup.py to read its metadata, so pip itself checks the hash before that.
    Raises BuildError with pip's output.
    """
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
    argv += ["--disable-pip-version-check", "--require-hashes", "-d", str(folder), "-r"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(f"horovod=={HOROVOD} --hash=sha256:{SOURCE_SHA256}\n")
        requirements.flush()
        result = run_program([*argv, requirements.name], environ=environ, timeout_s=_TIMEOUT_S)
    archive = folder / f"horovod-{HOROVOD}.tar.gz"
    if not archive.is_file():
        raise BuildError(
            f"Horovod's source could not be downloaded: {result.ending}. The output of pip:\n"
            f"{result.stderr.strip() or result.stdout.strip()}\nOn a host without a package index download "
            f"{archive.name} elsewhere and pass it with --source."
        )
    check_source(archive)
    return archive


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
    try:
        with tarfile.open(archive) as tar:
            if not hasattr(tarfile, "data_filter"):
                raise BuildError(
                    f"Python {sys.version.split()[0]} cannot unpack archives safely. Use 3.10.12, 3.11.4 or newer."
                )
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise BuildError(f"{archive} cannot be unpacked: {error}. Download it again.") from None
    files = sorted((*folder.glob("setup.py"), *folder.glob("*/setup.py")))
    if len(files) != 1:
        raise BuildError(f"{archive} has {len(files)} files setup.py, not one: it is not Horovod's source archive.")
    return files[0].parent
