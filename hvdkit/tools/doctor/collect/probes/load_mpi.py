"""Load the MPI library that mpi4py finds, say which it is, then start it: loading may fail, starting may also hang."""

from __future__ import annotations

import json
import re
from typing import Any

_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def main() -> None:
    """Print the version of the library, then the thread level with which it starts."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        _print(error=" ".join(str(error).split()))
        return
    mpi: Any = MPI
    library = " ".join(mpi.Get_library_version().replace("\0", " ").split())
    version, subversion = mpi.Get_version()
    _print(library=library, standard=f"{version}.{subversion}", path=_find_path())
    mpi.Init_thread(mpi.THREAD_MULTIPLE)
    level = mpi.Query_thread()
    names = {getattr(mpi, f"THREAD_{name}"): f"MPI_THREAD_{name}" for name in _LEVELS}
    _print(threads=names.get(level, str(level)))
    mpi.Finalize()


def _find_path() -> str:
    try:
        with open("/proc/self/maps") as file:
            found = re.search(r"(/\S*/libmpi(?:_cray|_intel|ch)?\S*\.so\S*)$", file.read(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1) if found else ""


def _print(**facts: str) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
