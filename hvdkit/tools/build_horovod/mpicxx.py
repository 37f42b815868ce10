"""Find the compiler of the MPI that hvdrun uses."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.launch.mpi import Mpi

_NAMES = ("mpicxx", "mpic++", "mpiCC", "mpiicpx", "mpiicpc")
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class MpiCompiler:
    """MPI's C++ compiler.

    command: what it runs in its turn, with all -I, -L and -rpath.
    """

    name: str
    version: str
    path: str
    command: str

    @property
    def home(self) -> str:
        """The folder above its bin."""
        return str(Path(self.path).parent.parent)

    @property
    def library_folders(self) -> tuple[str, ...]:
        """Where the linker is sent for libmpi."""
        words = shlex.split(self.command)
        return tuple(dict.fromkeys(word[2:] for word in words if word.startswith("-L/")))


def find_mpicxx(mpi: Mpi) -> str:
    """Find the compiler beside an mpirun; "" if there is none."""
    folder = Path(mpi.mpirun).parent
    return next((str(folder / name) for name in _NAMES if os.access(folder / name, os.X_OK)), "")


def read_mpicxx(mpi: Mpi, path: str, environ: Mapping[str, str]) -> MpiCompiler:
    """Ask MPI's compiler what it would run; `command` is "" if it does not say."""
    for question in ("-show", "--showme"):  # MPICH, Intel MPI and Open MPI know the first
        try:
            answer = subprocess.run(
                [path, question],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            break
        if answer.returncode == 0:
            return MpiCompiler(mpi.name, mpi.version, path, answer.stdout.strip())
    return MpiCompiler(mpi.name, mpi.version, path, "")
