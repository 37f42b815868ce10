"""Install a wheel of Horovod, and check that it works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import BuildError

_INSTALL_TIMEOUT_S = 300.0
_CHECK_TIMEOUT_S = 180.0
#: Sums rank + 1 over the ranks, and prints what is built in.
_BODY = """
import sys
sys.path = [folder for folder in sys.path if folder]  # not a folder `horovod` that lies about here
{imports}
hvd.init()
total = hvd.allreduce({value}, op=hvd.Sum).numpy().tolist()
if hvd.size() != {ranks} or total != [{expected}] * 5:
    sys.exit(f"rank {{hvd.rank()}} of {{hvd.size()}} got {{total}}, not {expected}")
lacking = [name for name in {parts} if not getattr(hvd, name + "_built")()]
if lacking:
    sys.exit(f"it was built without {{lacking}}")
hvd.shutdown()
"""
_FRAMEWORKS = {
    "torch": (
        "import torch, horovod.torch as hvd",
        "torch.full((5,), hvd.rank() + 1.0)",
    ),
    "tensorflow": (
        "import tensorflow as tf, horovod.tensorflow as hvd",
        "tf.fill([5], hvd.rank() + 1.0)",
    ),
}


def install_wheel(wheel: Path, environ: Mapping[str, str]) -> None:
    """Install a wheel over whatever Horovod is there; BuildError with what pip said."""
    argv = [sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall", "--no-index"]
    status, said = _run([*argv, "--disable-pip-version-check", str(wheel)], environ, _INSTALL_TIMEOUT_S)
    if status:
        raise BuildError(f"{wheel} could not be installed; pip said:\n{said}")


def check_horovod(framework: str, ranks: int, parts: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Let ranks import Horovod, reduce once and tell whether all parts are built in.

    parts: as in Horovod's `..._built()`: mpi, gloo, nccl.
    Raises BuildError with the end of what the ranks said.
    """
    argv = [sys.executable, "-m", "hvdkit.launch", "-np", str(ranks), sys.executable, "-c"]
    status, said = _run([*argv, build_check(framework, ranks, parts)], environ, _CHECK_TIMEOUT_S)
    if status:
        end = "\n".join(said.splitlines()[-20:])
        raise BuildError(
            f"Horovod is installed, and does not work with {framework} on {ranks} ranks:\n{end}\n"
            "If it should, build it anew with --rebuild."
        )


def build_check(framework: str, ranks: int, parts: tuple[str, ...]) -> str:
    """Build the program that each rank runs."""
    imports, value = _FRAMEWORKS[framework]
    expected = float(sum(range(1, ranks + 1)))
    return _BODY.format(imports=imports, value=value, ranks=ranks, expected=expected, parts=parts)


def _run(argv: list[str], environ: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        output = late.output.decode(errors="replace") if isinstance(late.output, bytes) else late.output or ""
        return -1, f"{output}\n(no end within {timeout_s:.0f} s)"
    return done.returncode, done.stdout.strip()
