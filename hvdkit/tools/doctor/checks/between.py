"""Agents, connections and their speed between hosts."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator

from hvdkit.tools.doctor.checks.names import are_loopback
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.hosts.networks import addresses_of, common_networks, describe_network, network_of
from hvdkit.tools.doctor.hosts.seen import Reach, Survey
from hvdkit.tools.doctor.hosts.start import explain

#: One way is called slow if another is this many times faster.
_FASTER = 3.0


def check_answers(survey: Survey) -> Iterator[Finding]:
    """Tell which hosts have no agent, and why; and where hosts cannot log in to one another."""
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
            f"ssh does not work without a question from {shown}{more} ({cause}).",
            "Nothing has to be done if jobs are started from this host, or by the scheduler; else give every host "
            "the key and the others' host keys.",
            tuple(dict.fromkeys(source for source, _ in pairs)),
        )


def check_reach(survey: Survey) -> Iterator[Finding]:
    """Judge the connections to what the names lead to: nobody there, somebody else, no way."""
    for target, facts in survey.answering:
        tried: dict[str, list[Reach]] = defaultdict(list)
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
    """Find a network that all hosts share and that is much faster than the one which their names lead to."""
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
            f"The hosts' names lead to a network with {slowest:.0f} Mbit/s, and on {describe_network(survey, best)} "
            f"they have {rates[best]:.0f}.",
            _use(str(best)),
        )


def _explain_reach(survey: Survey, target: str, address: str, problem: str, sources: list[str], own: bool) -> Finding:
    where = f"{target} ({address})"
    others = common_networks(survey)
    way = f" All hosts reach one another on {describe_network(survey, others[0])}." if others else ""
    hosts = tuple(sources)
    if problem == "other" or not own:
        return Finding(
            "error",
            "name-other-host",
            f"On {', '.join(sources)} the name {target} leads to {address}, which is not an address of {target}.",
            f"Correct {target} in DNS, or in /etc/hosts of {', '.join(sources)}.{way}",
            hosts,
        )
    facts = dict(survey.answering)
    network = network_of(facts[target], address)
    apart = [source for source in sources if network is not None and not _has_network(survey, source, str(network))]
    if apart:
        return Finding(
            "error",
            "wrong-subnet",
            f"{', '.join(apart)} cannot reach {where}: that is in {network}, in which {', '.join(apart)} has no "
            f"address ({problem}).",
            f"Let {target} lead to an address in a network that all hosts share.{way}",
            hosts,
        )
    cause = {"timeout": "what is sent there is dropped", "refused": "it is refused"}.get(problem, problem)
    return Finding(
        "error",
        "port-unreachable",
        f"{', '.join(sources)} cannot connect to a port of {where}: {cause}. Names and ssh work.",
        "Have the firewall between the hosts opened for all ports (MPI, NCCL and Gloo take any that is free), or "
        f"keep them within a range that is open.{way}",
        hosts,
    )


def _rates(survey: Survey) -> dict[ipaddress.IPv4Network, list[float]]:
    facts = dict(survey.answering)
    found: dict[ipaddress.IPv4Network, dict[str, float]] = defaultdict(dict)
    for each in survey.reaches:
        network = network_of(facts[each.target], each.address) if each.target in facts else None
        if each.mbit and network is not None:
            found[network][each.source] = max(found[network].get(each.source, 0.0), each.mbit)
    return {network: list(rates.values()) for network, rates in found.items()}


def _has_network(survey: Survey, source: str, network: str) -> bool:
    facts = dict(survey.answering)[source]
    return any(str(network_of(facts, address)) == network for address in addresses_of(facts))


def _use(network: str) -> str:
    return (
        f"Let the names lead there; or for Open MPI set OMPI_MCA_btl_tcp_if_include={network}, and "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to its interfaces."
    )
