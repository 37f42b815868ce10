"""The hosts on which a job can be started: all hosts except those that are lost or do not answer.

A script of the user may list the hosts: it prints `host:slots` lines, as for Horovod.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hvdkit.errors import LaunchError
from hvdkit.launch.detect import hosts as host_lookup
from hvdkit.launch.detect.hosts import count_cores, is_local
from hvdkit.launch.hostfiles import Host, complete_slots
from hvdkit.launch.hostfiles.grammars import content_lines, parse_numbered, read_lines
from hvdkit.launch.plan.job import total_slots

Hosts = tuple[Host, ...]

_SCRIPT_S, _SSH_S, _DRAINED_S = 20.0, 15.0, 1.0
_LONGEST = 1 << 20
_SHOWN = 3
_PROBES_AT_ONCE = 16
_UNREACHABLE_S = (5.0, 60.0)  # a host that does not answer may be starting up
_CHECK_S = 1.0


class Blacklist:
    """Hosts that are excluded for a time, which about doubles with each exclusion, as in Horovod.

    cooldown: (shortest, longest) in seconds; None to exclude hosts for good. draw: returns a random number from 0 to 1.
    """

    def __init__(self, cooldown: tuple[float, float] | None = None, draw: Callable[[], float] = random.random) -> None:
        self._cooldown, self._draw = cooldown, draw
        self._times: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def add(self, host: str, now: float) -> float:
        """Exclude a host from now on; returns the number of seconds, infinity for good."""
        self._times[host] = times = self._times.get(host, 0) + 1
        cooldown_s = float("inf")
        if self._cooldown is not None:
            shortest, longest = self._cooldown
            cooldown_s = max(shortest, min(longest, shortest * 2 ** min(times, 40) + self._draw() * shortest))
        self._until[host] = now + cooldown_s
        return cooldown_s

    def allows(self, host: str, now: float) -> bool:
        """Is the host not excluded now?"""
        return self._until.get(host, now) <= now

    @property
    def returns(self) -> bool:
        """Were hosts excluded, and not for good?"""
        return self._cooldown is not None and bool(self._until)


@dataclass
class HostPool:
    """Finds the hosts that can run ranks, without lost hosts and those that do not answer. Times are of `clock`."""

    hosts: Hosts  # at first
    say: Callable[[str], None]
    discover: Callable[[], Awaitable[Hosts]] | None = None  # finds the hosts again; None if they stay the same
    answers: Callable[[Host], Awaitable[bool]] | None = None  # can ranks be started on a host? None if that is unknown
    lost: Blacklist = field(default_factory=Blacklist)
    clock: Callable[[], float] = time.monotonic
    _unreachable: Blacklist = field(default_factory=lambda: Blacklist(_UNREACHABLE_S))
    _discovered: Hosts | None = None
    _answered: set[str] = field(default_factory=set)
    _last_message: str = ""

    @property
    def may_change(self) -> bool:
        """Can the hosts change later?"""
        return self.discover is not None or self.lost.returns or self._unreachable.returns

    async def find(self, trusted: Collection[str] = ()) -> Hosts:
        """Find the hosts that can be used now. trusted: names of hosts that need not be probed."""
        if self.discover is not None:
            await self._discover(self.discover)
        now = self.clock()
        usable = [
            host for host in self.hosts if self.lost.allows(host.name, now) and self._unreachable.allows(host.name, now)
        ]
        known = self._answered | set(trusted)
        probed = [host for host in usable if host.name not in known and not is_local(host)]
        if self.answers is not None and probed:
            answered = await _probe(probed, self.answers)
            self._answered |= answered
            unreachable = {host.name for host in probed} - answered
            for name in sorted(unreachable):
                retry_s = self._unreachable.add(name, now)
                self._say_once(f"{name} does not answer to ssh; trying again in {retry_s:.0f} s.")
            usable = [host for host in usable if host.name not in unreachable]
        return tuple(usable)

    def exclude(self, names: Collection[str]) -> None:
        """Exclude hosts that were lost."""
        for name in sorted({host.name for host in self.hosts if not is_local(host)}.intersection(names)):
            seconds = self.lost.add(name, self.clock())
            self.say(f"{name} is excluded {'from now on' if seconds == float('inf') else f'for {seconds:.0f} s'}.")
        self._answered.difference_update(names)

    def probe_again(self) -> None:
        """Probe all hosts again in the next find(), because one of them failed."""
        self._answered.clear()

    async def _discover(self, discover: Callable[[], Awaitable[Hosts]]) -> None:
        try:
            found = await discover()
        except LaunchError as error:
            self._say_once(f"{error} hvdrun continues with the hosts that it knows.")
            return
        if found != self._discovered:
            host_lookup.resolve.cache_clear()
            # The name service and ssh may take seconds, during which the job must be supervised.
            known = [host for host in found if await asyncio.to_thread(host_lookup.is_known, host)]
            self._discovered, self.hosts = found, tuple(known)

    def _say_once(self, message: str) -> None:
        if message != self._last_message:
            self._last_message = message
            self.say(message)


async def _probe(hosts: Sequence[Host], answers: Callable[[Host], Awaitable[bool]]) -> set[str]:
    """Return the names of the hosts that answer."""
    turns = asyncio.Semaphore(_PROBES_AT_ONCE)

    async def probe(host: Host) -> bool:
        async with turns:
            return await answers(host)

    found = await asyncio.gather(*map(probe, hosts))
    return {host.name for host, well in zip(hosts, found, strict=True) if well}


def probe_over_ssh(options: Sequence[str]) -> Callable[[Host], Awaitable[bool]]:
    """Make a function that tries to log in to a host. options: of ssh."""

    async def answers(host: Host) -> bool:
        try:
            status, _ = await _run(("ssh", *options, "--", host.login, "true"), None, _SSH_S, reads=False)
        except OSError:
            return False
        return status == 0

    return answers


def count_slots(hosts: Hosts) -> int | None:
    """Count the slots of hosts; None if those of a host are unknown. This machine has as many slots as cores."""
    return total_slots(hosts, {host.name: count_cores() for host in hosts if is_local(host)})


async def wait_for_slots(
    find: Callable[[], Awaitable[Hosts]],
    choose: Callable[[Hosts], int],
    *,
    min_ranks: int,
    wait_s: float,
    say: Callable[[str], None],
    needed_by: str = "--min-np",
    may_grow: Callable[[], bool] = lambda: True,
) -> tuple[Hosts, int] | None:
    """Wait until a job has enough hosts; returns them and the number of ranks on them, None after `wait_s`.

    find: finds the hosts that can be used now.
    choose: returns the number of ranks for these hosts, 0 if it would be less than min_ranks.
    min_ranks: the least number of ranks.
    wait_s: the time limit, in seconds.
    say: prints a line.
    needed_by: the option that sets min_ranks.
    may_grow: can the hosts change later?
    """
    clock = asyncio.get_running_loop().time
    deadline, waiting = clock() + wait_s, False
    while True:
        hosts = await find()
        if ranks := choose(hosts):
            return hosts, ranks
        if clock() >= deadline or not may_grow():
            return None
        if not waiting:
            waiting, slots = True, count_slots(hosts) or 0
            needed = f"{min_ranks} are needed ({needed_by})" if min_ranks > 1 else "1 is needed"
            say(
                f"there {'are' if slots != 1 else 'is'} {slots} slot{'s' * (slots != 1)}, and {needed}: waiting up to "
                f"{wait_s:g} s for more (--elastic-timeout)."
            )
        await asyncio.sleep(_CHECK_S)


class Discovery:
    """The discovery script, which each find_hosts() runs.

    script: its path, or a command line; no shell reads it. slots: of hosts for which it prints no number; None if a
    number is required. environ: its variables.
    Raises LaunchError if the program does not exist.
    """

    def __init__(self, script: str, slots: int | None, environ: Mapping[str, str]) -> None:
        self._script, self._slots, self._environ = script, slots, environ
        self._words = split_script(script, environ.get("PATH", os.defpath))

    async def find_hosts(self) -> tuple[Host, ...]:
        """Run the script; returns its hosts. Raises LaunchError if it fails, or takes too long."""
        try:
            status, printed = await _run(self._words, self._environ, _SCRIPT_S)
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"{self._what} cannot be started: {error}. Its first line must name its interpreter, such as "
                "#!/bin/sh.",
                code="discovery-script-not-started",
            ) from None
        if status is None:
            raise LaunchError(
                f"{self._what} did not end within {_SCRIPT_S:g} s. It must print the hosts and end.",
                code="discovery-script-too-slow",
            )
        if len(printed) > _LONGEST:
            raise LaunchError(
                f"--host-discovery-script printed over {_LONGEST} bytes. Print one host:slots per line.",
                code="discovery-script-too-much-output",
            )
        if status:
            raise LaunchError(
                f"{self._what} ended with exit code {status}. Run it by hand to see why.",
                code="discovery-script-failed",
            )
        return parse_discovered(printed.decode(errors="replace"), self._what, self._slots)

    @property
    def _what(self) -> str:
        return f"--host-discovery-script {self._script}"


def split_script(script: str, path: str) -> tuple[str, ...]:
    """Split into the program and its arguments. path: to search. Raises LaunchError if the program does not exist."""
    try:
        words = (script,) if os.path.isfile(script) else tuple(shlex.split(script))
    except ValueError as error:
        raise LaunchError(
            f"--host-discovery-script {script!r} cannot be split into words: {error}. Check the quotes.",
            code="discovery-script-quotes",
        ) from None
    program = words[0] if words else ""
    found = os.path.abspath(program) if os.path.isfile(program) else shutil.which(program, path=path)
    if not found:
        raise LaunchError(
            f"--host-discovery-script {script!r}: no such program. Check the path.", code="discovery-script-missing"
        )
    if not os.access(found, os.X_OK):
        raise LaunchError(
            f"--host-discovery-script {script!r} is not executable. Run: chmod +x {shlex.quote(program)}",
            code="discovery-script-not-executable",
        )
    return found, *words[1:]


def parse_discovered(text: str, what: str, slots: int | None) -> tuple[Host, ...]:
    """Parse the hosts that a script printed, which may be none.

    what: the script, for messages. slots: of hosts without a number; None if a number is required.
    Raises LaunchError for names and numbers that are not allowed: names are used on command lines.
    """
    reading = read_lines(content_lines(text), parse_numbered)
    problems = [f"line {line}: {why}" for line, why in reading.problems]
    hosts = complete_slots(reading.hosts, slots)
    if any(host.slots is None for host in hosts):
        problems.append("a host has no number of slots: print host:slots, or give --slots-per-host")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise LaunchError(
            f"{what} printed lines that cannot be used: {'; '.join(problems[:_SHOWN])}{more}.",
            code="discovery-script-output",
        )
    return hosts


async def _run(
    words: Sequence[str], environ: Mapping[str, str] | None, timeout_s: float, *, reads: bool = True
) -> tuple[int | None, bytes]:
    """Run a program; returns its exit code, None if it did not end in time, and its output if `reads`.

    It is killed, with the processes that it has started, after that time or if it prints more than _LONGEST bytes.
    Raises OSError and ValueError if it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *words,
        env=None if environ is None else dict(environ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE if reads else asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    reading = asyncio.ensure_future(_read(process))
    try:
        # Not wait_for(): before Python 3.12 it loses a cancellation, and so Ctrl-C, that comes as the program ends.
        done, _ = await asyncio.wait({reading}, timeout=timeout_s)
        return (process.returncode or 0, reading.result()) if done else (None, b"")
    finally:
        reading.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.communicate(), _DRAINED_S)


async def _read(process: asyncio.subprocess.Process) -> bytes:
    """Read the output of a process until it ends, or is too long."""
    data = b""
    while process.stdout is not None and (block := await process.stdout.read(1 << 16)):
        data += block
        if len(data) > _LONGEST:
            return data
    await process.wait()
    return data
