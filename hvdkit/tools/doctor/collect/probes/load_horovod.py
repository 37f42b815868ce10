"""Load Horovod's library for one framework, and say what is built into it. Argument: torch or tensorflow."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

_PARTS = ("mpi", "gloo", "nccl", "cuda", "rocm", "ccl", "ddl")


def main(framework: str) -> None:
    """Print the parts, or why the library cannot be loaded."""
    try:
        module: Any = importlib.import_module(f"horovod.{framework}")
        parts = [name for name in _PARTS if getattr(module, f"{name}_built")()]
    except Exception as error:  # whatever Horovod or the framework raises is the answer
        print(json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}), flush=True)
        return
    print(json.dumps({"parts": parts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
