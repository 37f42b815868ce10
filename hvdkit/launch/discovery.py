"""Hosts that come and go: a script of the user's says which there are now, one `host:slots` a line, as for Horovod."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from collections.abc import Mapping

from hvdkit.errors import LaunchError
from hvdkit.launch.hosts import Host, settle_slots
from hvdkit.launch.hosts.horovod import parse_part
from hvdkit.launch.hosts.reading import content_lines, read_lines

_ANSWERS_S = 20.0
_DRAINED_S = 1.0
_LONGEST = 1 << 20
_SHOWN = 3


class Discovery:
    """The script, which is run anew by each look().

    script: its path, or a command line; no shell reads it. slots: of hosts for which it gives no number; None if it
    has to. environ: its variables.
    Raises LaunchError if there is no such program.
    """

    def __init__(self, script: str, slots: int | None, environ: Mapping[str, str]) -> None:
        self._script, self._slots, self._environ = script, slots, environ
        self._words = split_script(script, environ.get("PATH", os.defpath))

    async def look(self) -> tuple[Host, ...]:
        """The hosts that there are now. Raises LaunchError if the script does not say, in time."""
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
            raise LaunchError(f"{self._what} cannot be started: {error}. Does it begin with #!/bin/sh?") from None
        try:
            text = await asyncio.wait_for(_read(process), _ANSWERS_S)
        except asyncio.TimeoutError:
            raise LaunchError(f"{self._what} has not answered within {_ANSWERS_S:g} s. Let it list hosts.") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(process.communicate(), _DRAINED_S)
        if process.returncode:
            raise LaunchError(f"{self._what} has ended with status {process.returncode}. Try it by hand.")
        return parse_discovered(text, self._what, self._slots)

    @property
    def _what(self) -> str:
        return f"--host-discovery-script {self._script}"


def split_script(script: str, path: str) -> tuple[str, ...]:
    """The program and its arguments. path: where it is looked for. Raises LaunchError if there is no such program."""
    try:
        words = (script,) if os.path.isfile(script) else tuple(shlex.split(script))
    except ValueError as error:
        raise LaunchError(f"--host-discovery-script {script!r} cannot be split into words: {error}.") from None
    program = words[0] if words else ""
    found = os.path.abspath(program) if os.path.isfile(program) else shutil.which(program, path=path)
    if not found:
        raise LaunchError(f"--host-discovery-script {script!r}: there is no such program. Check the path.")
    if not os.access(found, os.X_OK):
        raise LaunchError(f"--host-discovery-script {script!r} is not executable. Run: chmod +x {shlex.quote(program)}")
    return found, *words[1:]


def parse_discovered(text: str, what: str, slots: int | None) -> tuple[Host, ...]:
    """Read the hosts that a script has printed; none is an answer too.

    what: has printed it. slots: of hosts without a number; None if there have to be numbers.
    Raises LaunchError with what cannot be used: names end up on command lines.
    """
    reading = read_lines(content_lines(text), parse_part)
    problems = [f"line {line}: {why}" for line, why in reading.problems]
    hosts = settle_slots(reading.hosts, slots)
    if any(host.slots is None for host in hosts):
        problems.append("a host has no slots: print host:slots, or give --slots-per-host")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise LaunchError(f"{what} has printed what cannot be used: {'; '.join(problems[:_SHOWN])}{more}.")
    return hosts


async def _read(process: asyncio.subprocess.Process) -> str:
    """All that it prints until it ends."""
    assert process.stdout is not None
    data = b""
    while block := await process.stdout.read(1 << 16):
        data += block
        if len(data) > _LONGEST:
            raise LaunchError(f"A --host-discovery-script has printed more than {_LONGEST} bytes. Let it list hosts.")
    await process.wait()
    return data.decode(errors="replace")
