"""Start MPI and print the size of the world: two ranks of it tell whether launcher and library belong together."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Print one line, in one piece: those of several ranks share a pipe."""
    from mpi4py import MPI

    sys.stdout.write(json.dumps({"size": MPI.COMM_WORLD.Get_size()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
