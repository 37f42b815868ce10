"""Jobs of hvdrun for tests on GPUs: two ranks, each with a GPU of its own where there are several, else sharing one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hvdrun_job import HVDRUN, environment

from hvdkit.errors import LaunchError
from hvdkit.launch.detect.gpus import count_gpus

RANKS = 2
_TESTS = Path(__file__).parent


def count_gpus_here() -> int:
    """The number of GPUs that CUDA shows to a process, without a framework."""
    try:
        return count_gpus(os.environ)
    except LaunchError:
        return 0


def placement(device: str) -> list[str]:
    """hvdrun's options for two ranks on this device."""
    share = device == "cuda" and count_gpus_here() < RANKS
    return ["-np", str(RANKS), *(["--share-gpus"] if share else [])]


def variables(**more: str) -> dict[str, str]:
    """The environment of a job."""
    environ = environment()
    return {**environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), environ["PYTHONPATH"]]), **more}


def command(folder: Path, function: str, device: str, **arguments: Any) -> list[str]:
    """The command of hvdrun for "module:function" of these files; arguments and device: of the call."""
    call = json.dumps({"device": device, **arguments})
    return [*HVDRUN, *placement(device), sys.executable, str(_TESTS / "gpu_rank.py"), function, str(folder), call]


def run(folder: Path, function: str, device: str, *, backend: str = "torch", **arguments: Any) -> list[Any]:
    """Call "module:function" on the ranks; returns what each returned. AssertionError with the output if one failed.

    backend: of Keras.
    """
    done = subprocess.run(
        command(folder, function, device, **arguments),
        env=variables(KERAS_BACKEND=backend),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
