"""Queries the agents of all hosts, and the connections between them; then times a small job on all hosts."""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from hvdkit.launch.detect.hosts import is_local
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.plan.environment import select_forwarded
from hvdkit.launch.process import ProcessResult, run_program
from hvdkit.tools.doctor.collect.host import collect
from hvdkit.tools.doctor.collect.probes import probe_argv, read_object
from hvdkit.tools.doctor.facts import HostFacts, decode
from hvdkit.tools.doctor.hosts.session import AgentLost, AgentSession, agent_command, srun_argv, ssh_argv
from hvdkit.tools.doctor.survey import (
    Allreduce,
    ConnectionAttempt,
    Failure,
    HostReport,
    Login,
    Lookup,
    Rank,
    Survey,
    find_common_subnets,
)

COUNT = 1 << 22  # elements of float32: 16 MiB
_TIMEOUT_S = 15.0
_CHOICE = "OMPI_MCA_btl_tcp_if_include"
#: A rate above that of one TCP stream of Python or MPI; faster networks count as this fast.
_FASTEST_MBIT = 8000.0


def time_allreduce(hosts: Sequence[Host], environ: Mapping[str, str], survey: Survey) -> Allreduce:
    """Run an allreduce with a rank for each slot, at most two a host; needs ssh and MPI to work.

    If it fails or is slow, and the hosts share a network, it is run again over that network alone.
    """
    job = _run(hosts, environ, survey)
    networks = find_common_subnets(survey)
    if not (job.error or job.slow) or not networks or _CHOICE in environ or survey.here.hvdrun.kind != "open_mpi":
        return job
    again = _run(hosts, {**environ, _CHOICE: str(networks[0])}, survey)
    if again.error or (not job.error and again.seconds > job.seconds / 2):
        return job
    return replace(job, remedy=f"{_CHOICE}={networks[0]}", remedy_s=again.seconds)


def _run(hosts: Sequence[Host], environ: Mapping[str, str], survey: Survey) -> Allreduce:
    places = ",".join(f"{_bracket(host.login)}:{min(2, host.slots or 1)}" for host in hosts)
    # hvdkit's own binding may give a rank one core, its share. The finding rank-one-core could not distinguish that
    # from the launcher's own binding. The network, which this job tests, does not depend on it.
    hvdrun = [sys.executable, "-m", "hvdkit.launch", "--bind=none", *survey.ssh_options, "-H", places]
    result = run_program([*hvdrun, *probe_argv("time_allreduce", str(COUNT))], environ=environ, timeout_s=_TIMEOUT_S)
    objects = [found for line in result.stdout.splitlines() if (found := read_object(line))]
    ranks = tuple(
        Rank(item["rank"], item["host"], item["size"], item["cores"], item.get("visible"), item.get("chosen", ""))
        for item in objects
        if "rank" in item
    )
    timed = next((item for item in objects if "seconds" in item), None)
    if timed is None or result.status != 0:
        return Allreduce(ranks=ranks, error=_explain(result))
    slowest_mbit = min((each.mbit for each in survey.reaches if each.named and each.mbit), default=0.0)
    expected = expect_seconds(COUNT * 4, len(hosts), slowest_mbit)
    return Allreduce(COUNT * 4, timed["seconds"], expected, timed["transport"], ranks)


def expect_seconds(size: int, hosts: int, mbit: float) -> float:
    """Compute the expected seconds of a ring allreduce over the slowest link; 0.0 if its rate is unknown.

    size: bytes to sum.
    hosts: number of hosts.
    mbit: rate of the slowest link in Mbit/s.
    """
    if hosts < 2 or mbit <= 0:
        return 0.0
    return 2 * (hosts - 1) / hosts * size * 8e-6 / min(mbit, _FASTEST_MBIT)


def _explain(result: ProcessResult) -> str:
    lines = [line.strip() for line in result.output.splitlines() if line.strip() and not read_object(line)]
    telling = [line for line in lines if re.search(r"error|refused|cannot|unable|fail|not ", line, re.IGNORECASE)]
    said = next(iter(telling or lines), "nothing was printed")
    return f"{result.ending}: {said}"


def _bracket(login: str) -> str:
    user, at, name = login.rpartition("@")
    return f"{user}{at}[{name}]" if ":" in name else login


_HELLO_S, _COLLECT_S, _CONNECT_S, _ASK_S = 15.0, 50.0, 30.0, 15.0
# With more hosts than these, each tries only some of the others; sshd drops logins that come ten at a time.
_MOST_CONNECTED, _MOST_LOGINS = 32, 8
Answer = TypeVar("Answer")


def list_peers(source: str, names: Sequence[str], most: int) -> list[str]:
    """List the hosts that a host tries: all others, or with more than `most` hosts the next ones in a ring."""
    if source not in names:
        return []
    start = names.index(source) + 1
    return [*names[start:], *names[: start - 1]][: len(names) if len(names) <= most else most // 2]


class Surveyor:
    """Holds the agents during the survey.

    hosts: the hosts.
    environ: the variables of this process.
    via: "ssh" or "srun".
    ssh_options: options of ssh.
    progress: called with the name of each step, to show it on a terminal.
    """

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
        self._agents: dict[str, AgentSession] = {}
        self._ports: dict[str, int] = {}  # ports on which the agents answer each other
        self._reports = {login: HostReport(login, host.slots or 0) for login, host in self._hosts.items()}

    async def run(self) -> Survey:
        """Carry out the survey."""
        try:
            return await self._survey()
        finally:  # together: other agents may be waiting for these
            await asyncio.gather(*(agent.close() for agent in self._agents.values()))

    async def _survey(self) -> Survey:
        began = time.monotonic()
        self._progress(f"collecting facts on {len(self._hosts)} hosts")
        here = None if self._local else asyncio.create_task(asyncio.to_thread(collect, self._environ))
        lookups = await self._ask_each(self._collect, self._hosts)
        self._progress("connecting every host to the others")
        found = {(each.source, each.name): each.addresses for each in lookups}
        plans = {source: self._plan_attempts(source, found) for source in self._list_answering()}
        reaches = await self._ask_each(lambda source: self._connect(source, plans[source]), plans)
        self._progress("trying ssh between the hosts")
        logins = await self._ask_each(self._log_in, self._list_answering())
        local = next((facts for login in self._local if (facts := self._reports[login].facts)), None)
        return Survey(
            here=await here if here else local or collect(self._environ),
            hosts=tuple(self._reports.values()),
            via=self._via,
            ssh_options=self._ssh_options,
            lookups=tuple(lookups),
            reaches=tuple(reaches),
            logins=tuple(logins),
            seconds=time.monotonic() - began,
        )

    async def _ask_each(self, request: Callable[[str], Awaitable[list[Answer]]], logins: Iterable[str]) -> list[Answer]:
        """Query several agents at the same time; an agent that fails is lost from then on."""

        async def ask(login: str) -> list[Answer]:
            try:
                return await request(login)
            except AgentLost as lost:
                self._reports[login] = replace(self._reports[login], facts=None, failure=lost.failure)
                return []

        return [answer for answers in await asyncio.gather(*map(ask, logins)) for answer in answers]

    async def _collect(self, login: str) -> list[Lookup]:
        """Start the agent of a host, and make it collect facts."""
        argv = command = agent_command(self._environ)
        if login not in self._local:
            argv = ssh_argv(login, command, self._ssh_options) if self._via == "ssh" else srun_argv(login, command)
        agent = self._agents[login] = await AgentSession.open(argv, self._environ)
        await agent.await_hello(_HELLO_S)
        offset_s, error_s = await _compare_clocks(agent)
        forwarded = {"KERAS_HOME", "LD_PRELOAD", *select_forwarded(self._environ)}
        variables = {name: self._environ[name] for name in forwarded if name in self._environ}
        master = self._environ.get("MASTER_ADDR", "")
        names = list(dict.fromkeys([*(host.name for host in self._hosts.values()), *([master] if master else [])]))
        found = await agent.ask(
            "collect", _COLLECT_S, variables=variables, names=names, secret=self._secret, host=login
        )
        self._ports[login] = found["port"]
        facts = decode(HostFacts, found["facts"])
        self._reports[login] = replace(self._reports[login], facts=facts, offset_s=offset_s, error_s=error_s)
        return [Lookup(login, name, tuple(each)) for name, each in zip(names, found["addresses"], strict=True)]

    def _list_answering(self) -> dict[str, HostFacts]:
        return {login: report.facts for login, report in self._reports.items() if report.facts is not None}

    def _plan_attempts(
        self, source: str, addresses: Mapping[tuple[str, str], tuple[str, ...]]
    ) -> list[ConnectionAttempt]:
        """List the addresses that a host tries: those of the others' names, and all their interfaces.

        addresses: by the host that has resolved a name, and the name.
        """
        plan, answering = [], self._list_answering()
        for target in list_peers(source, list(answering), _MOST_CONNECTED):
            named = addresses[source, self._hosts[target].name]
            plan += [ConnectionAttempt(source, target, address, True) for address in named]
            interfaces = answering[target].machine.network.interfaces
            plan += [ConnectionAttempt(source, target, each.address, False) for each in interfaces if not each.loopback]
        return plan

    async def _connect(self, source: str, plan: Sequence[ConnectionAttempt]) -> list[ConnectionAttempt]:
        """Try the planned connections; measure the bandwidth from the next host in a ring, the first of the plan."""
        targets = [
            (each.address, self._ports[each.target], each.target, each.target == plan[0].target) for each in plan
        ]
        answers = await self._agents[source].ask("connect", _CONNECT_S, secret=self._secret, targets=targets)
        return [replace(each, problem=problem, mbit=mbit) for each, (problem, mbit) in zip(plan, answers, strict=True)]

    async def _log_in(self, source: str) -> list[Login]:
        """Try ssh from a host to the others; from this host the agents' start has tried it."""
        if source in self._local and self._via == "ssh":
            return []
        targets = list_peers(source, list(self._hosts), _MOST_LOGINS)
        answers = await self._agents[source].ask("login", _ASK_S, logins=targets, options=self._ssh_options)
        return [
            Login(source, target, Failure(answer["status"], answer["said"]) if answer else None)
            for target, answer in zip(targets, answers, strict=True)
        ]


async def _compare_clocks(agent: AgentSession) -> tuple[float, float]:
    """Measure how far the agent's clock is ahead, and the error; uses the quickest answer, which is the most exact."""
    best = (0.0, float("inf"))
    for _ in range(3):
        before = time.time()
        there = await agent.ask("clock", _ASK_S)
        after = time.time()
        best = min(best, (there - (before + after) / 2, (after - before) / 2), key=lambda found: found[1])
    return best
