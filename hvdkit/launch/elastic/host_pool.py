"""The hosts on which a job can be started: all that there are, except lost ones and those that do not answer."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.plan import resolve_hosts
from hvdkit.launch.plan.job import total_slots
from hvdkit.launch.plan.resolve_hosts import count_cores, is_local

Hosts = tuple[Host, ...]

_ANSWER_S = 15.0
_PROBES_AT_ONCE = 16
_UNREACHABLE_S = (5.0, 60.0)  # a host that does not answer may be starting up
_CHECK_S = 1.0


class Blacklist:
    """Hosts that are excluded for a time, about twice as long each time, as in Horovod.

    cooldown: (shortest, longest) in seconds; None to exclude them for good. draw: a random number from 0 up to 1.
    """

    def __init__(self, cooldown: tuple[float, float] | None = None, draw: Callable[[], float] = random.random) -> None:
        self._cooldown, self._draw = cooldown, draw
        self._times: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def add(self, host: str, now: float) -> float:
        """Exclude a host from now on; returns for how many seconds, infinity for good."""
        self._times[host] = times = self._times.get(host, 0) + 1
        cooldown_s = float("inf")
        if self._cooldown is not None:
            shortest, longest = self._cooldown
            cooldown_s = max(shortest, min(longest, shortest * 2 ** min(times, 40) + self._draw() * shortest))
        self._until[host] = now + cooldown_s
        return cooldown_s

    def allows(self, host: str, now: float) -> bool:
        """Whether the host is not excluded now."""
        return self._until.get(host, now) <= now

    @property
    def returns(self) -> bool:
        """Whether hosts were excluded, and not for good."""
        return self._cooldown is not None and bool(self._until)


@dataclass
class HostPool:
    """See above. Times are of `clock`."""

    hosts: Hosts  # at first
    say: Callable[[str], None]
    discover: Callable[[], Awaitable[Hosts]] | None = None  # finds the hosts anew; None if they stay the same
    answers: Callable[[Host], Awaitable[bool]] | None = None  # can ranks be started on it? None if that is not known
    lost: Blacklist = field(default_factory=Blacklist)
    clock: Callable[[], float] = time.monotonic
    _unreachable: Blacklist = field(default_factory=lambda: Blacklist(_UNREACHABLE_S))
    _discovered: Hosts | None = None
    _answered: set[str] = field(default_factory=set)
    _last_message: str = ""

    @property
    def may_change(self) -> bool:
        """Whether there may be other hosts at some time."""
        return self.discover is not None or self.lost.returns or self._unreachable.returns

    async def find(self, trusted: Collection[str] = ()) -> Hosts:
        """The hosts that can be used now. trusted: names of those that need not be probed."""
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
        """Have all hosts probed again, because something was wrong with one of them."""
        self._answered.clear()

    async def _discover(self, discover: Callable[[], Awaitable[Hosts]]) -> None:
        try:
            found = await discover()
        except LaunchError as error:
            self._say_once(f"{error} hvdrun continues with the hosts that it knows.")
            return
        if found != self._discovered:
            import asyncio

            resolve_hosts.resolve.cache_clear()
            # The name service and ssh may take seconds, in which the job is to be supervised.
            known = [host for host in found if await asyncio.to_thread(resolve_hosts.is_known, host)]
            self._discovered, self.hosts = found, tuple(known)

    def _say_once(self, message: str) -> None:
        if message != self._last_message:
            self._last_message = message
            self.say(message)


async def _probe(hosts: Sequence[Host], answers: Callable[[Host], Awaitable[bool]]) -> set[str]:
    """The names of the hosts that answer."""
    import asyncio  # slow to load, and hvdrun --help gets here

    turns = asyncio.Semaphore(_PROBES_AT_ONCE)

    async def probe(host: Host) -> bool:
        async with turns:
            return await answers(host)

    found = await asyncio.gather(*map(probe, hosts))
    return {host.name for host, well in zip(hosts, found, strict=True) if well}


def probe_over_ssh(options: Sequence[str]) -> Callable[[Host], Awaitable[bool]]:
    """Make a function that tries to log in to a host. options: of ssh."""
    import asyncio

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
            return await asyncio.wait_for(process.wait(), _ANSWER_S) == 0
        except asyncio.TimeoutError:
            return False
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    return answers


def count_slots(hosts: Hosts) -> int | None:
    """Count the slots of hosts; None if one host's are not known. This machine has as many as it has cores."""
    return total_slots(hosts, {host.name: count_cores() for host in hosts if is_local(host)})


def describe_slots(hosts: Hosts, min_ranks: int) -> str:
    """Say how many slots there are, of how many."""
    slots = count_slots(hosts) or 0
    return (
        f"there {'are' if slots != 1 else 'is'} {slots} slot{'s' * (slots != 1)}, and {min_ranks} are needed (--min-np)"
    )


async def wait_for_slots(
    find: Callable[[], Awaitable[Hosts]],
    choose: Callable[[Hosts], int],
    *,
    wait_s: float,
    may_grow: Callable[[], bool],
    on_wait: Callable[[Hosts], None],
) -> tuple[Hosts, int] | None:
    """Wait until there are hosts for a job; returns them and the ranks on them, None after `wait_s`.

    choose: the number of ranks for these hosts, 0 if they are too few. may_grow: may there be others later? on_wait:
    called once when the wait begins.
    """
    import asyncio

    clock = asyncio.get_running_loop().time
    deadline, waiting = clock() + wait_s, False
    while True:
        hosts = await find()
        if ranks := choose(hosts):
            return hosts, ranks
        if clock() >= deadline or not may_grow():
            return None
        if not waiting:
            waiting = True
            on_wait(hosts)
        await asyncio.sleep(_CHECK_S)
