"""Three healthy hosts, for tests that break one thing between them."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from doctor_facts import facts_with

from hvdkit.launch.plan.network import InterfaceAddress
from hvdkit.tools.doctor.facts import Accelerators, HostFacts
from hvdkit.tools.doctor.survey import Allreduce, ConnectionAttempt, HostReport, Login, Lookup, Rank, Survey

NAMES = ("node1", "node2", "node3")
WIRES = ("eth0", "ens5", "enp7s0")


def host_facts(number: int) -> HostFacts:
    interfaces = (
        InterfaceAddress("lo", "127.0.0.1", "127.0.0.0/8"),
        InterfaceAddress(WIRES[number - 1], f"10.77.0.1{number}", "10.77.0.0/24"),
        InterfaceAddress(f"eno{number}", f"10.78.0.1{number}", "10.78.0.0/24"),
        InterfaceAddress("eth1", f"192.168.10{number}.10", f"192.168.10{number}.0/24"),
        InterfaceAddress("docker0", "172.17.0.1", "172.17.0.0/16"),
    )
    return facts_with(
        host=f"node{number}",
        accelerators=Accelerators(torch_cuda="13.0", nccl="2.28.3"),
        machine__network__interfaces=interfaces,
        machine__network__addresses=(f"10.77.0.1{number}",),
    )


def list_reaches() -> tuple[ConnectionAttempt, ...]:
    """All that is tried: the wire works and is fast, the other network works and is slow, the rest leads nowhere."""
    reaches = []
    for here, there in permutations((1, 2, 3), 2):
        source, target = f"node{here}", f"node{there}"
        ring = there == here % 3 + 1
        reaches += [
            ConnectionAttempt(source, target, f"10.77.0.1{there}", True, mbit=9000.0 * ring),
            ConnectionAttempt(source, target, f"10.77.0.1{there}", False, mbit=9000.0 * ring),
            ConnectionAttempt(source, target, f"10.78.0.1{there}", False, mbit=95.0 * ring),
            ConnectionAttempt(source, target, f"192.168.10{there}.10", False, "timeout"),
            ConnectionAttempt(source, target, "172.17.0.1", False, "refused"),
        ]
    return tuple(reaches)


HEALTHY_SURVEY = Survey(
    here=host_facts(1),
    hosts=tuple(
        HostReport(name, 2, host_facts(number), None, 0.001, 0.002) for number, name in enumerate(NAMES, start=1)
    ),
    lookups=tuple(
        Lookup(source, name, (f"10.77.0.1{number}",)) for source in NAMES for number, name in enumerate(NAMES, start=1)
    ),
    reaches=list_reaches(),
    logins=tuple(Login(source, target) for source, target in permutations(NAMES, 2) if source != "node1"),
    allreduce=Allreduce(1 << 24, 0.05, 0.04, "hierarchical", tuple(Rank(n, NAMES[n // 2], 6, 16) for n in range(6))),
    seconds=3.0,
)


def with_facts(survey: Survey, name: str, facts: HostFacts) -> Survey:
    """The survey with other facts of a host."""
    hosts = tuple(replace(host, facts=facts) if host.name == name else host for host in survey.hosts)
    return replace(survey, hosts=hosts, here=facts if name == "node1" else survey.here)


def with_environ(survey: Survey, **variables: str) -> Survey:
    """The survey with the same variables on all hosts."""
    for host in survey.hosts:
        assert host.facts is not None
        survey = with_facts(survey, host.name, replace(host.facts, environ={**host.facts.environ, **variables}))
    return survey
