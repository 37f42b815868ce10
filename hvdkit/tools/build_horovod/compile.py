"""Compile the mended source into a wheel."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from hvdkit.errors import BuildError
from hvdkit.tools.build_horovod.cache import Cache
from hvdkit.tools.build_horovod.first_error import find_first_error, suggest
from hvdkit.tools.build_horovod.mends import apply_mends
from hvdkit.tools.build_horovod.plan import Plan, build_environment
from hvdkit.tools.build_horovod.source import unpack


def compile_wheel(plan: Plan, archive: Path, cache: Cache, listen: Callable[[str], None]) -> Path:
    """Unpack, mend and compile in a folder of its own; returns the wheel in the cache.

    listen: is given every line of output, which also goes to the log.
    Raises BuildError with the first error in the log, and the log's path.
    """
    log = cache.log(plan)
    cache.make(log.parent)
    with tempfile.TemporaryDirectory(prefix="hvdkit-horovod-") as name:
        tree = unpack(archive, Path(name, "source"))
        apply_mends(tree, plan.mends)
        out = Path(name, "wheel")
        argv = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-index"]
        argv += ["--disable-pip-version-check", "--no-cache-dir", "-w", str(out), "."]
        environ = {**build_environment(plan), **_link_nccl(plan, cache)}
        status = _run(argv, tree, environ, log, listen)
        wheels = sorted(out.glob("*.whl"))
        if status or len(wheels) != 1:
            raise BuildError(describe_failure(log, status))
        return cache.keep(plan, wheels[0])


def describe_failure(log: Path, status: int) -> str:
    """Say why a build failed, from its log."""
    error = find_first_error(log.read_text(errors="replace"))
    told = f"The first error:\n{error}" if error else "No line of its output looks like an error."
    return "\n".join(filter(None, [f"The build failed with status {status}. {told}", suggest(error), f"Log: {log}"]))


def _link_nccl(plan: Plan, cache: Cache) -> dict[str, str]:
    """Give NCCL's library the name that CMake looks for: the wheel of it has libnccl.so.2 only.

    In the cache, not in the build's folder: Horovod's library keeps the path.
    """
    nccl = plan.site.gpu_tools.nccl
    if plan.gpu.operations != "NCCL" or nccl is None or nccl.library.endswith(".so"):
        return {}
    folder = cache.home / "nccl" / plan.key
    cache.make(folder)
    for name in ("libnccl.so", Path(nccl.library).name):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(nccl.library)
    return {"HOROVOD_NCCL_LIB": str(folder)}


def _run(argv: list[str], folder: Path, environ: dict[str, str], log: Path, listen: Callable[[str], None]) -> int:
    with log.open("w") as file:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        with _ending_raises():
            try:
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    listen(line)
                return process.wait()
            finally:
                if process.poll() is None:  # interrupted: end the compilers as well
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


@contextlib.contextmanager
def _ending_raises() -> Iterator[None]:
    """Turn the signals that end a process into SystemExit, so that what was begun is cleaned up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
