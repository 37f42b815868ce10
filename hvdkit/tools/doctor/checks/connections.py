"""Checks of logins, connections and bandwidth between hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hvdkit.tools.doctor.checks.names import are_loopback
from hvdkit.tools.doctor.findings import Finding
from hvdkit.tools.doctor.hosts.start import explain
from hvdkit.tools.doctor.survey import (
    ConnectionAttempt,
    Survey,
    addresses_of,
    describe_common_network,
    describe_subnet,
    subnet_of,
)

#: One way is called slow if another is this many times faster.
_FASTER = 3.0


def check_answers(survey: Survey) -> Iterator[Finding]:
    """Find hosts without an agent, and hosts that cannot log in to one another."""
    for host in survey.hosts:
        if host.failure is not None:
            yield explain(host.name, host.failure, survey.via, survey.ssh_options)
    silent = {host.name for host in survey.hosts if host.failure is not None}
    lost = {(each.source, each.target) for each in survey.reaches if each.named and each.problem}
    lost -= {(each.source, each.target) for each in survey.reaches if each.named and not each.problem}
    lost |= {(each.source, each.name) for each in survey.lookups if not each.addresses or are_loopback(each.addresses)}
    failing = [
        login
        for login in survey.logins
        # Where the name or the way is wrong there is another finding, and ssh cannot work.
        if login.failure is not None and login.target not in silent and (login.source, login.target) not in lost
    ]
    causes: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for login in failing:
        assert login.failure is not None
        causes[explain(login.target, login.failure, "ssh", survey.ssh_options).name].append(
            (login.source, login.target)
        )
    for cause, pairs in causes.items():
        shown = ", ".join(f"{source} to {target}" for source, target in pairs[:4])
        more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
        yield Finding(
            "note" if survey.via == "srun" else "warning",
            "ssh-between",
            f"ssh without a prompt fails from {shown}{more} ({cause}).",
            "Ignore this if jobs are started from this host or by the scheduler; else give every host "
            "the key and the others' host keys.",
            tuple(dict.fromkeys(source for source, _ in pairs)),
        )


def check_reach(survey: Survey) -> Iterator[Finding]:
    """Check the connections to the addresses of the host names."""
    for target, facts in survey.answering.items():
        tried: dict[str, list[ConnectionAttempt]] = defaultdict(list)
        for each in survey.reaches:
            if each.target == target and each.named and not are_loopback([each.address]):
                tried[each.source].append(each)
        failing = {source: reaches for source, reaches in tried.items() if all(each.problem for each in reaches)}
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for source, reaches in failing.items():
            groups[(reaches[0].address, reaches[0].problem)].append(source)
        for (address, problem), sources in groups.items():
            yield _explain_reach(survey, target, address, problem, sources, address in addresses_of(facts))


def check_speed(survey: Survey) -> Iterator[Finding]:
    """Find a network that all hosts share and that is much faster than the one of their names."""
    named = [each.mbit for each in survey.reaches if each.named and each.mbit]
    if not named:
        return
    slowest = min(named)
    rates = {
        network: min(rates)
        for network, rates in _rates(survey).items()
        if len(rates) == len({each.source for each in survey.reaches if each.mbit})
    }
    best = max(rates, key=lambda network: rates[network], default=None)
    if best is not None and rates[best] > _FASTER * slowest:
        yield Finding(
            "warning",
            "slow-network",
            f"The host names resolve to a network with {slowest:.0f} Mbit/s, but {describe_subnet(survey, best)} "
            f"has {rates[best]:.0f}.",
            _use(best),
        )


def _explain_reach(survey: Survey, target: str, address: str, problem: str, sources: list[str], own: bool) -> Finding:
    where = f"{target} ({address})"
    way = describe_common_network(survey)
    hosts = tuple(sources)
    if problem == "other" and own:
        return Finding(
            "error",
            "name-other-host",
            f"When {', '.join(sources)} connects to {address}, an address of {target}, another machine answers.",
            f"Give {target} an address that no other machine, container or virtual machine has.{way}",
            hosts,
        )
    if not own:
        return Finding(
            "error",
            "name-other-host",
            f"On {', '.join(sources)} the name {target} resolves to {address}, which is not an address of {target}.",
            f"Correct {target} in DNS, or in /etc/hosts of {', '.join(sources)}.{way}",
            hosts,
        )
    network = subnet_of(survey.answering[target], address)
    apart = [source for source in sources if network and not _has_network(survey, source, network)]
    if apart:
        return Finding(
            "error",
            "wrong-subnet",
            f"{', '.join(apart)} cannot reach {where} ({problem}): this address is in the network {network}, and "
            f"{', '.join(apart)} has no address in it.",
            f"Make {target} resolve to an address in a network that all hosts share.{way}",
            hosts,
        )
    cause = {"timeout": "packets are dropped", "refused": "the connection is refused"}.get(problem, problem)
    return Finding(
        "error",
        "port-unreachable",
        f"{', '.join(sources)} cannot connect to a port of {where}: {cause}. The name and ssh work.",
        "Open the firewall between the hosts for all ports (MPI, NCCL and Gloo use any free port), or "
        f"restrict them to an open range.{way}",
        hosts,
    )


def _rates(survey: Survey) -> dict[str, list[float]]:
    facts = survey.answering
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for each in survey.reaches:
        network = subnet_of(facts[each.target], each.address) if each.target in facts else ""
        if each.mbit and network:
            found[network][each.source] = max(found[network].get(each.source, 0.0), each.mbit)
    return {network: list(rates.values()) for network, rates in found.items()}


def _has_network(survey: Survey, source: str, network: str) -> bool:
    facts = survey.answering[source]
    return any(subnet_of(facts, address) == network for address in addresses_of(facts))


def _use(network: str) -> str:
    return (
        f"Make the names resolve to it; or for Open MPI set OMPI_MCA_btl_tcp_if_include={network}, and "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to its interfaces."
    )
