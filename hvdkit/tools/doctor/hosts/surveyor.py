"""Ask the agents of all hosts, at the same time, about their hosts and the connections between them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from hvdkit.launch.hostfiles import Host
from hvdkit.launch.plan.environment import select_forwarded
from hvdkit.launch.plan.resolve_hosts import is_local
from hvdkit.tools.doctor.collect.host import collect
from hvdkit.tools.doctor.facts import HostFacts, decode
from hvdkit.tools.doctor.hosts.session import AgentLost, AgentSession, agent_command, srun_argv, ssh_argv
from hvdkit.tools.doctor.survey import ConnectionAttempt, Failure, HostReport, Login, Lookup, Survey

_HELLO_S, _COLLECT_S, _ASK_S = 15.0, 40.0, 15.0
# With more hosts than these each tries some of the others only; sshd drops logins that come ten at a time.
_MOST_CONNECTED, _MOST_LOGINS = 32, 8
Answer = TypeVar("Answer")


def list_peers(source: str, names: Sequence[str], most: int) -> list[str]:
    """List the hosts that a host tries: all others, or of more than `most` hosts the next ones in a ring."""
    if source not in names:
        return []
    start = names.index(source) + 1
    return [*names[start:], *names[: start - 1]][: len(names) if len(names) <= most else most // 2]


class Surveyor:
    """Holds the agents during the survey. progress: called with what is being done, for a terminal."""

    def __init__(
        self,
        hosts: Sequence[Host],
        environ: Mapping[str, str],
        via: str,
        ssh_options: Sequence[str] = (),
        progress: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._hosts = {host.login: host for host in hosts}
        self._environ, self._via, self._ssh_options = dict(environ), via, tuple(ssh_options)
        self._progress = progress
        self._local = {host.login for host in hosts if is_local(host)}
        self._secret = secrets.token_hex(32)
        self._agents = {login: AgentSession() for login in self._hosts}
        self._failures: dict[str, Failure] = {}
        self._facts: dict[str, HostFacts] = {}
        self._ports: dict[str, int] = {}
        self._clocks: dict[str, tuple[float, float]] = {}

    async def run(self) -> Survey:
        """Carry out the survey."""
        began = time.monotonic()
        try:
            self._progress(f"collecting facts on {len(self._hosts)} hosts")
            here = None if self._local else asyncio.create_task(asyncio.to_thread(collect, self._environ))
            await asyncio.gather(*map(self._start, self._hosts))
            await self._ask_each(self._listen)
            self._progress("connecting every host to the others")
            lookups = await self._resolve()
            reaches = await self._measure(await self._connect(lookups))
            self._progress("trying ssh between the hosts")
            logins = await self._log_in()
            return Survey(
                here=await here if here else await self._find_local_facts(),
                hosts=tuple(map(self._describe, self._hosts.values())),
                via=self._via,
                ssh_options=self._ssh_options,
                lookups=tuple(lookups),
                reaches=tuple(reaches),
                logins=tuple(logins),
                seconds=time.monotonic() - began,
            )
        finally:
            await asyncio.gather(*(agent.close() for agent in self._agents.values()))

    async def _find_local_facts(self) -> HostFacts:
        local = next((login for login in self._facts if login in self._local), None)
        return self._facts[local] if local else await asyncio.to_thread(collect, self._environ)

    async def _start(self, login: str) -> None:
        argv = command = agent_command(self._environ)
        if login not in self._local:
            argv = ssh_argv(login, command, self._ssh_options) if self._via == "ssh" else srun_argv(login, command)
        names = {"KERAS_HOME", "LD_PRELOAD", *select_forwarded(self._environ)}
        variables = {name: self._environ[name] for name in names if name in self._environ}
        agent = self._agents[login]
        try:
            await agent.start(argv, self._environ, _HELLO_S)
            self._clocks[login] = await _compare_clocks(agent)
            self._facts[login] = decode(HostFacts, await agent.ask("collect", _COLLECT_S, variables=variables))
        except AgentLost as lost:
            self._failures[login] = lost.failure

    async def _ask_each(self, request: Callable[[str], Awaitable[Answer]]) -> dict[str, Answer]:
        """Ask the agents that have answered so far; one that fails is left out from here on."""

        async def ask(login: str) -> list[Answer]:
            try:
                return [await request(login)]
            except AgentLost as lost:
                self._failures[login] = lost.failure
                del self._facts[login]
                return []

        logins = list(self._facts)
        answers = await asyncio.gather(*map(ask, logins))
        return {login: answer for login, found in zip(logins, answers, strict=True) for answer in found}

    async def _listen(self, login: str) -> None:
        self._ports[login] = await self._agents[login].ask("listen", _ASK_S, secret=self._secret, host=login)

    async def _resolve(self) -> list[Lookup]:
        names = [host.name for host in self._hosts.values()]
        master = self._environ.get("MASTER_ADDR", "")
        names = list(dict.fromkeys([*names, *([master] if master else [])]))
        answers = await self._ask_each(lambda source: self._agents[source].ask("resolve", _ASK_S, names=names))
        return [
            Lookup(source, name, tuple(addresses))
            for source, found in answers.items()
            for name, addresses in zip(names, found, strict=True)
        ]

    async def _connect(self, lookups: Sequence[Lookup]) -> list[ConnectionAttempt]:
        plans = {source: self._plan_attempts(source, lookups) for source in self._facts}

        async def ask(source: str) -> list[ConnectionAttempt]:
            targets = [self._target(plan.target, plan.address) for plan in plans[source]]
            problems = await self._agents[source].ask("connect", _ASK_S, secret=self._secret, targets=targets)
            return [replace(plan, problem=problem) for plan, problem in zip(plans[source], problems, strict=True)]

        return [attempt for attempts in (await self._ask_each(ask)).values() for attempt in attempts]

    def _target(self, login: str, address: str) -> tuple[str, int, str]:
        return address, self._ports[login], login

    def _plan_attempts(self, source: str, lookups: Sequence[Lookup]) -> list[ConnectionAttempt]:
        """List the addresses that a host tries: those of the others' names, and all their interfaces."""
        plan = []
        for target in list_peers(source, list(self._facts), _MOST_CONNECTED):
            name = self._hosts[target].name
            found = [each for each in lookups if each.source == source and each.name == name]
            plan += [ConnectionAttempt(source, target, address, True) for each in found for address in each.addresses]
            interfaces = self._facts[target].machine.network.interfaces
            plan += [ConnectionAttempt(source, target, each.address, False) for each in interfaces if not each.loopback]
        return plan

    async def _measure(self, attempts: list[ConnectionAttempt]) -> list[ConnectionAttempt]:
        """Measure the bandwidth from each host's next one in a ring, on each address that answers."""
        ring = list(self._facts)
        following = {source: ring[(at + 1) % len(ring)] for at, source in enumerate(ring) if len(ring) > 1}
        addresses = {
            source: list(
                dict.fromkeys(
                    each.address
                    for each in attempts
                    if (each.source, each.target) == (source, target) and not each.problem
                )
            )
            for source, target in following.items()
        }

        async def ask(source: str) -> dict[tuple[str, str], float]:
            targets = [self._target(following[source], address) for address in addresses[source]]
            speeds = await self._agents[source].ask("measure", _ASK_S, secret=self._secret, targets=targets)
            return {(source, address): speed for address, speed in zip(addresses[source], speeds, strict=True)}

        answers = await self._ask_each(ask) if following else {}
        speeds = {key: speed for found in answers.values() for key, speed in found.items()}
        return [
            replace(each, mbit=speeds.get((each.source, each.address), 0.0))
            if each.target == following.get(each.source) and not each.problem
            else each
            for each in attempts
        ]

    async def _log_in(self) -> list[Login]:
        """Try ssh from each host to the others; from this one it has been tried."""

        async def ask(source: str) -> list[Login]:
            if source in self._local and self._via == "ssh":
                return []
            targets = list_peers(source, list(self._hosts), _MOST_LOGINS)
            answers = await self._agents[source].ask("login", _ASK_S, logins=targets, options=self._ssh_options)
            return [
                Login(source, target, Failure(answer["status"], answer["said"]) if answer else None)
                for target, answer in zip(targets, answers, strict=True)
            ]

        return [login for logins in (await self._ask_each(ask)).values() for login in logins]

    def _describe(self, host: Host) -> HostReport:
        offset, error = self._clocks.get(host.login, (0.0, 0.0))
        facts = self._facts.get(host.login)
        failure = None if facts is not None else self._failures.get(host.login, Failure(None, ""))
        return HostReport(host.login, host.slots or 0, facts, failure, offset, error)


async def _compare_clocks(agent: AgentSession) -> tuple[float, float]:
    """Measure how far the agent's clock is ahead, and the error; of some answers the quickest is the most exact."""
    best = (0.0, float("inf"))
    for _ in range(3):
        before = time.time()
        there = await agent.ask("clock", _ASK_S)
        after = time.time()
        best = min(best, (there - (before + after) / 2, (after - before) / 2), key=lambda found: found[1])
    return best
