"""The hosts that there are now, from a script of the user that prints `host:slots` lines, as for Horovod."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from collections.abc import Mapping

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import Host, settle_slots
from hvdkit.launch.hostfiles.grammars import content_lines, parse_numbered, read_lines

_ANSWER_S = 20.0
_DRAINED_S = 1.0
_LONGEST = 1 << 20
_SHOWN = 3


class Discovery:
    """The script, which find_hosts() runs anew each time.

    script: its path, or a command line; no shell reads it. slots: of hosts for which it prints no number; None if a
    number is required. environ: its variables.
    Raises LaunchError if there is no such program.
    """

    def __init__(self, script: str, slots: int | None, environ: Mapping[str, str]) -> None:
        self._script, self._slots, self._environ = script, slots, environ
        self._words = split_script(script, environ.get("PATH", os.defpath))

    async def find_hosts(self) -> tuple[Host, ...]:
        """Run the script; returns its hosts. Raises LaunchError if it fails, or takes too long."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                env=dict(self._environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"{self._what} cannot be started: {error}. Its first line must name its interpreter, such as #!/bin/sh."
            ) from None
        reading = asyncio.ensure_future(_read(process))
        try:
            # Not wait_for(): before Python 3.12 it loses a cancellation, and so Ctrl-C, that comes as the script ends.
            done, _ = await asyncio.wait({reading}, timeout=_ANSWER_S)
            if not done:
                raise LaunchError(f"{self._what} did not end within {_ANSWER_S:g} s. It must print the hosts and end.")
            text = reading.result()
        finally:
            reading.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(process.communicate(), _DRAINED_S)
        if process.returncode:
            raise LaunchError(f"{self._what} ended with exit code {process.returncode}. Run it by hand to see why.")
        return parse_discovered(text, self._what, self._slots)

    @property
    def _what(self) -> str:
        return f"--host-discovery-script {self._script}"


def split_script(script: str, path: str) -> tuple[str, ...]:
    """The program and its arguments. path: where it is looked for. Raises LaunchError if there is no such program."""
    try:
        words = (script,) if os.path.isfile(script) else tuple(shlex.split(script))
    except ValueError as error:
        raise LaunchError(
            f"--host-discovery-script {script!r} cannot be split into words: {error}. Check the quotes."
        ) from None
    program = words[0] if words else ""
    found = os.path.abspath(program) if os.path.isfile(program) else shutil.which(program, path=path)
    if not found:
        raise LaunchError(f"--host-discovery-script {script!r}: no such program. Check the path.")
    if not os.access(found, os.X_OK):
        raise LaunchError(f"--host-discovery-script {script!r} is not executable. Run: chmod +x {shlex.quote(program)}")
    return found, *words[1:]


def parse_discovered(text: str, what: str, slots: int | None) -> tuple[Host, ...]:
    """Parse the hosts that a script printed, which may be none.

    what: the script, for messages. slots: of hosts without a number; None if a number is required.
    Raises LaunchError for names and numbers that are not allowed: names end up on command lines.
    """
    reading = read_lines(content_lines(text), parse_numbered)
    problems = [f"line {line}: {why}" for line, why in reading.problems]
    hosts = settle_slots(reading.hosts, slots)
    if any(host.slots is None for host in hosts):
        problems.append("a host has no number of slots: print host:slots, or give --slots-per-host")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise LaunchError(f"{what} printed lines that cannot be used: {'; '.join(problems[:_SHOWN])}{more}.")
    return hosts


async def _read(process: asyncio.subprocess.Process) -> str:
    """Read the output of a process until it ends."""
    assert process.stdout is not None
    data = b""
    while block := await process.stdout.read(1 << 16):
        data += block
        if len(data) > _LONGEST:
            raise LaunchError(f"--host-discovery-script printed over {_LONGEST} bytes. Print one host:slots per line.")
    await process.wait()
    return data.decode(errors="replace")
