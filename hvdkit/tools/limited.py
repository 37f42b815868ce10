"""A command that is ended when it takes too long, with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_END_S = 10.0


def run_limited(command: Sequence[str], environ: Mapping[str, str], output: Path, limit_s: float) -> int | None:
    """Run a command to its end; returns its exit code, None if it took longer than the limit and was ended.

    output: the file that takes its stdout and stderr. A command that does not end when it is asked to is killed.
    """
    with output.open("w") as file:
        job = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return job.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if job.poll() is None:
                _end(job)


def _end(job: subprocess.Popen[bytes]) -> None:
    # hvdrun ends its ranks when it is asked to.
    job.terminate()
    try:
        job.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def read_tail(output: Path, lines: int) -> list[str]:
    """The last lines of an output."""
    return output.read_text(errors="replace").splitlines()[-lines:]
