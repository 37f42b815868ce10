"""Ask all hosts, at the same time, about themselves and about one another."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from hvdkit.launch.check import is_local
from hvdkit.launch.environment import select_forwarded
from hvdkit.launch.hosts import Host
from hvdkit.tools.doctor.codec import decode
from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.hosts.remote import Gone, Remote
from hvdkit.tools.doctor.hosts.seen import Failure, Login, Lookup, Reach, Seen, Survey
from hvdkit.tools.doctor.hosts.start import agent_command, srun_argv, ssh_argv
from hvdkit.tools.doctor.look.collect import collect

_HELLO_S, _COLLECT_S, _ASK_S = 15.0, 40.0, 15.0
# With more hosts than these each tries some of the others only; sshd drops logins that come ten at a time.
_ALL_REACHED, _ALL_LOGINS = 32, 8
Answer = TypeVar("Answer")


def list_peers(source: str, names: Sequence[str], most: int) -> list[str]:
    """Which of the others a host tries: all, or where there are more than `most` hosts, the next ones in a ring."""
    if source not in names:
        return []
    start = names.index(source) + 1
    return [*names[start:], *names[: start - 1]][: len(names) if len(names) <= most else most // 2]


class Surveyor:
    """Holds the agents while they are asked."""

    def __init__(
        self, hosts: Sequence[Host], environ: Mapping[str, str], via: str, ssh_options: Sequence[str] = ()
    ) -> None:
        self._hosts, self._environ, self._via = list(hosts), dict(environ), via
        self._ssh_options = tuple(ssh_options)
        self._pool = ThreadPoolExecutor(len(self._hosts) + 1)
        self._token = secrets.token_hex(8)
        self._agents: dict[str, Remote] = {}
        self._failures: dict[str, Failure] = {}
        self._facts: dict[str, Facts] = {}
        self._ports: dict[str, int] = {}
        self._clocks: dict[str, tuple[float, float]] = {}

    def run(self) -> Survey:
        """Ask everything."""
        began = time.monotonic()
        with self._pool, ExitStack() as stack:
            stack.callback(self._close)
            here = None if any(map(is_local, self._hosts)) else self._pool.submit(collect, self._environ)
            self._each(self._start, [host.login for host in self._hosts])
            self._ask_each(self._listen)
            lookups = self._look_up()
            reaches = self._measure(self._reach(lookups))
            logins = self._log_in()
            local = next((host.login for host in self._hosts if is_local(host) and host.login in self._facts), None)
            return Survey(
                here=here.result() if here else self._facts[local] if local else collect(self._environ),
                hosts=tuple(map(self._describe, self._hosts)),
                via=self._via,
                ssh_options=self._ssh_options,
                lookups=tuple(lookups),
                reaches=tuple(reaches),
                logins=tuple(logins),
                seconds=time.monotonic() - began,
            )

    def _start(self, name: str) -> None:
        host = next(host for host in self._hosts if host.login == name)
        command = agent_command(self._environ)
        argv = ssh_argv(name, command, self._ssh_options) if self._via == "ssh" else srun_argv(name, command)
        argv = command if is_local(host) else argv
        names = {"KERAS_HOME", "LD_PRELOAD", *select_forwarded(self._environ)}
        variables = {name: self._environ[name] for name in names if name in self._environ}
        try:
            agent = self._agents[name] = Remote(argv, self._environ)
            agent.greet(_HELLO_S)
            self._clocks[name] = self._compare_clocks(agent)
            self._facts[name] = decode(Facts, agent.ask("collect", _COLLECT_S, variables=variables))
        except Gone as gone:
            self._failures[name] = gone.failure

    def _compare_clocks(self, agent: Remote) -> tuple[float, float]:
        """How far the agent's clock is ahead, and how wrong that may be; the quickest of some answers tells best."""
        best = (0.0, float("inf"))
        for _ in range(3):
            before = time.time()
            there = agent.ask("clock", _ASK_S)
            after = time.time()
            best = min(best, (there - (before + after) / 2, (after - before) / 2), key=lambda found: found[1])
        return best

    def _each(self, function: Callable[[str], Answer], names: Sequence[str]) -> dict[str, Answer]:
        return dict(zip(names, self._pool.map(function, names), strict=True))

    def _ask_each(self, question: Callable[[str], Answer]) -> dict[str, Answer]:
        """Ask those that have answered so far; who does not answer any more is left out from here on."""

        def ask(name: str) -> Any:
            try:
                return question(name)
            except Gone as gone:
                self._failures[name] = gone.failure
                del self._facts[name]
                return None

        answers = self._each(ask, list(self._facts))
        return {name: answer for name, answer in answers.items() if name in self._facts}

    def _listen(self, name: str) -> None:
        self._ports[name] = self._agents[name].ask("listen", _ASK_S, greeting=f"{self._token} {name}")

    def _look_up(self) -> list[Lookup]:
        names = {host.login: host.name for host in self._hosts}
        master = self._environ.get("MASTER_ADDR", "")
        wanted = list(dict.fromkeys([*names.values(), *([master] if master else [])]))
        answers = self._ask_each(lambda source: self._agents[source].ask("lookup", _ASK_S, names=wanted))
        return [
            Lookup(source, name, tuple(addresses))
            for source, found in answers.items()
            for name, addresses in zip(wanted, found, strict=True)
        ]

    def _reach(self, lookups: Sequence[Lookup]) -> list[Reach]:
        plans = {source: list(self._plan(source, lookups)) for source in self._facts}

        def ask(source: str) -> list[Reach]:
            targets = [
                (plan.address, self._ports[plan.target], f"{self._token} {plan.target}") for plan in plans[source]
            ]
            problems = self._agents[source].ask("reach", _ASK_S, targets=targets)
            return [replace(plan, problem=problem) for plan, problem in zip(plans[source], problems, strict=True)]

        return [reach for reaches in self._ask_each(ask).values() for reach in reaches]

    def _plan(self, source: str, lookups: Sequence[Lookup]) -> list[Reach]:
        """Which addresses a host is to try: what names lead to, and every interface of the others."""
        names = {host.login: host.name for host in self._hosts}
        plan = []
        for target in list_peers(source, list(self._facts), _ALL_REACHED):
            found = [each for each in lookups if each.source == source and each.name == names[target]]
            plan += [Reach(source, target, address, True) for each in found for address in each.addresses]
            interfaces = self._facts[target].machine.network.interfaces
            plan += [Reach(source, target, each.address, False) for each in interfaces if each.up and not each.loopback]
        return plan

    def _measure(self, reaches: list[Reach]) -> list[Reach]:
        """Measure each host's way to the next one in a ring, on each address that answers."""
        ring = list(self._facts)
        following = dict(zip(ring, ring[1:] + ring[:1], strict=True))
        chosen = {
            source: sorted(
                {
                    each.address
                    for each in reaches
                    if not each.problem and (each.source, each.target) == (source, target)
                }
            )
            for source, target in following.items()
        }

        def ask(source: str) -> dict[tuple[str, str], float]:
            target = following[source]
            targets = [(address, self._ports[target], f"{self._token} {target}") for address in chosen[source]]
            speeds = self._agents[source].ask("measure", _ASK_S, targets=targets)
            return {(source, address): speed for address, speed in zip(chosen[source], speeds, strict=True)}

        speeds = {key: speed for found in self._ask_each(ask).values() for key, speed in found.items()}
        return [
            replace(each, mbit=speeds.get((each.source, each.address), 0.0))
            if each.target == following.get(each.source) and not each.problem
            else each
            for each in reaches
        ]

    def _log_in(self) -> list[Login]:
        """Try ssh from each host to the others; from this one it has been tried."""
        local = {host.login for host in self._hosts if is_local(host)}
        logins = [host.login for host in self._hosts]

        def ask(source: str) -> list[Login]:
            targets = list_peers(source, logins, _ALL_LOGINS)
            answers = self._agents[source].ask("login", _ASK_S, logins=targets, options=self._ssh_options)
            return [
                Login(source, target, Failure(answer["status"], answer["said"]) if answer else None)
                for target, answer in zip(targets, answers, strict=True)
            ]

        answers = self._ask_each(lambda source: [] if source in local and self._via == "ssh" else ask(source))
        return [login for found in answers.values() for login in found]

    def _describe(self, host: Host) -> Seen:
        offset, error = self._clocks.get(host.login, (0.0, 0.0))
        facts = self._facts.get(host.login)
        failure = None if facts is not None else self._failures.get(host.login, Failure(None, ""))
        return Seen(host.login, host.slots or 0, facts, failure, offset, error)

    def _close(self) -> None:
        list(self._pool.map(Remote.close, self._agents.values()))
