"""Run a program with a time limit, and end it with all processes that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.launch.agent.session_reaper import die_with_parent

#: Seconds between the request to end and the kill; hvdrun ends its ranks in this time.
_END_S = 10.0


@dataclass(frozen=True)
class ProcessResult:
    """The exit status and the output of a program.

    status: its exit code; negative for a signal; 127 if it could not be started, with the reason in stderr; None if it
    exceeded timeout_s and was killed.
    """

    status: int | None
    stdout: str
    stderr: str
    timeout_s: float

    @property
    def output(self) -> str:
        """Both streams, stdout first."""
        return self.stdout + self.stderr

    @property
    def ending(self) -> str:
        """Describe how it ended, as a clause: "it was killed by SIGSEGV"."""
        if self.status is None:
            return f"it did not end within {self.timeout_s:g} s"
        return describe_status(self.status)


def run_program(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float,
    merge: bool = False,
    text: str = "",
) -> ProcessResult:
    """Run a program to its end; its process group is killed when it exceeds the limit or this call is interrupted.

    argv: the program and its arguments.
    environ: its variables; None for this process's.
    timeout_s: the limit, in seconds.
    merge: write stderr to stdout, in the order of printing.
    text: its input.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=None if environ is None else dict(environ),
            stdin=subprocess.PIPE if text else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge else subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return ProcessResult(127, "", str(error), timeout_s)
    with process:
        try:
            out, err = process.communicate(os.fsencode(text) if text else None, timeout_s)
            status: int | None = process.returncode
        except BaseException as error:
            status = process.poll()  # it may have ended while a child of it still holds the pipe
            kill_group(process.pid)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            out, err = error.stdout or b"", error.stderr or b""
    return ProcessResult(status, _decode(out), _decode(err), timeout_s)


def run_into_file(
    argv: Sequence[str], *, environ: Mapping[str, str] | None = None, output: Path, timeout_s: float
) -> int | None:
    """Run a program whose stdout and stderr go to a file; returns its exit code, None if it exceeded the limit.

    After the limit it gets SIGTERM, before its process group is killed; when this process ends it gets SIGHUP. Raises
    OSError if it cannot be started.
    """
    with output.open("w") as file:
        process = subprocess.Popen(
            argv,
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid(), signal.SIGHUP),
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a process that leads its group, wait for its end, then kill the group."""
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    finally:
        kill_group(process.pid)
        process.wait()


def read_tail(output: Path, lines: int) -> list[str]:
    """Read the last lines of a file."""
    return output.read_text(errors="replace").splitlines()[-lines:]


def describe_status(status: int) -> str:
    """Describe an exit code, as a clause."""
    if status < 0:
        try:
            return f"it was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"it was killed by signal {-status}"
    return f"it ended with status {status}"


def kill_group(group: int) -> None:
    """Kill a process group if it still exists. group: the number of the process that led it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _decode(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")
