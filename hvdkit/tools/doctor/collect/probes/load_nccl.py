"""Load libnccl and CUDA's driver, and say which they are; neither needs a GPU for that. argv: HVDKIT_NCCL_LIBRARY."""

from __future__ import annotations

import ctypes
import json
import sys

from hvdkit.transport.nccl.library import find_library


def main(named: str) -> None:
    """Print the newest CUDA that the driver runs, then path and version of libnccl, or why it cannot be loaded."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            _print(driver_cuda=f"{number.value // 1000}.{number.value % 1000 // 10}")
    except (OSError, AttributeError):
        pass  # there is no driver; nvidia-smi tells that too
    path = find_library(named)
    try:
        result = ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        _print(error=" ".join(str(error).split()))
        return
    code = number.value
    factor = 10000 if code >= 10000 else 1000  # before NCCL 2.9
    if result == 0:
        _print(path=named or find_library(), version=f"{code // factor}.{code % factor // 100}.{code % 100}")
    else:
        _print(error=f"ncclGetVersion returned {result} in {path}")


def _print(**facts: str) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
