"""Hosts that a job may be started on: those that there are, without those that were lost or do not answer."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from hvdkit.errors import LaunchError
from hvdkit.launch import check
from hvdkit.launch.blacklist import Blacklist
from hvdkit.launch.hosts import Host

Hosts = tuple[Host, ...]

_ANSWERS_S = 15.0
_AT_ONCE = 16
#: A host that does not answer may be on its way up.
_SILENT_S = (5.0, 60.0)


@dataclass
class Available:
    """See above.

    hosts: at first. look: a discovery's; None if there are never others. tell: to the user.
    answers: does ranks' way to a host work? None where it is not known how to find out.
    """

    hosts: Hosts
    tell: Callable[[str], None]
    look: Callable[[], Awaitable[Hosts]] | None = None
    answers: Callable[[Host], Awaitable[bool]] | None = None
    lost: Blacklist = field(default_factory=Blacklist)
    _silent: Blacklist = field(default_factory=lambda: Blacklist(_SILENT_S))
    _found: Hosts | None = None
    _answered: set[str] = field(default_factory=set)
    _told: str = ""

    @property
    def changes(self) -> bool:
        """May there be other hosts some time?"""
        return self.look is not None or self.lost.returns or self._silent.returns

    async def find(self, trusted: Collection[str] = ()) -> Hosts:
        """The hosts that may be used now. trusted: names of those that need not be asked."""
        if self.look is not None:
            await self._look()
        now = _now()
        there = [
            host for host in self.hosts if self.lost.allows(host.name, now) and self._silent.allows(host.name, now)
        ]
        asked = [host for host in there if host.name not in self._answered | set(trusted) and not check.is_local(host)]
        if self.answers is not None and asked:
            turns = asyncio.Semaphore(_AT_ONCE)
            silent = {host.name for host, well in zip(asked, await self._ask(asked, turns), strict=True) if not well}
            for name in sorted(silent):
                self._tell_once(f"{name} does not answer, and is asked again in {self._silent.add(name, now):.0f} s.")
            self._answered.update(host.name for host in asked if host.name not in silent)
            there = [host for host in there if host.name not in silent]
        return tuple(there)

    def leave_out(self, names: Collection[str]) -> None:
        """These hosts were lost."""
        known = {host.name for host in self.hosts if not check.is_local(host)}
        for name in sorted(known.intersection(names)):
            seconds = self.lost.add(name, _now())
            self.tell(f"{name} is left out {'from now on' if seconds == float('inf') else f'for {seconds:.0f} s'}.")
        self._answered.difference_update(names)

    def doubt(self) -> None:
        """Something was wrong with some host: all are to be asked again."""
        self._answered.clear()

    async def _look(self) -> None:
        assert self.look is not None
        try:
            found = await self.look()
        except LaunchError as error:
            self._tell_once(f"{error} The hosts are taken to be those from before.")
            return
        if found != self._found:
            check.resolve.cache_clear()
            self._found, self.hosts = found, tuple(filter(check.is_known, found))

    async def _ask(self, hosts: Sequence[Host], turns: asyncio.Semaphore) -> list[bool]:
        async def ask(host: Host) -> bool:
            assert self.answers is not None
            async with turns:
                return await self.answers(host)

        return await asyncio.gather(*(ask(host) for host in hosts))

    def _tell_once(self, what: str) -> None:
        if what != self._told:
            self._told = what
            self.tell(what)


def ask_over_ssh(options: Sequence[str]) -> Callable[[Host], Awaitable[bool]]:
    """Make a question to a host: does it let us in? options: of ssh."""

    async def answers(host: Host) -> bool:
        try:
            process = await asyncio.create_subprocess_exec(
                *("ssh", *options, "--", host.login, "true"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            return False
        try:
            return await asyncio.wait_for(process.wait(), _ANSWERS_S) == 0
        except asyncio.TimeoutError:
            return False
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    return answers


def _now() -> float:
    return asyncio.get_running_loop().time()
