"""Checks of host names and their addresses, of logins, connections and bandwidth, and of variables for interfaces."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator, Sequence

from hvdkit.launch.plan.network import InterfaceAddress, is_inside
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest
from hvdkit.tools.doctor.hosts.session import explain
from hvdkit.tools.doctor.survey import (
    ConnectionAttempt,
    Survey,
    addresses_of,
    describe_common_network,
    describe_subnet,
    subnet_of,
    subnets_of,
)


def check_names(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check the addresses of the hostname and of localhost."""
    network = facts.machine.network
    if not network.localhost or not are_loopback(network.localhost):
        seen = f"resolves to {', '.join(network.localhost)}" if network.localhost else "resolves to no address"
        yield Finding.error("localhost", f"The name localhost {seen}.", "Put into /etc/hosts: 127.0.0.1 localhost")
    if not network.loopback_up:
        yield Finding.error("loopback-down", "The interface lo is down.", "As root: ip link set lo up")
    if job.hosts < 2:
        return
    if not network.addresses:
        yield Finding.warning(
            "hostname",
            f"The hostname {facts.host} resolves to no address on the host itself.",
            f"Put it into DNS, or into /etc/hosts of every host: ADDRESS {facts.host}",
        )
    elif are_loopback(network.addresses):
        yield Finding.warning(
            "hostname",
            f"{facts.host} resolves to {', '.join(network.addresses)} on the host itself: on the other hosts that "
            "address is their own (MASTER_ADDR=$(hostname -i), Gloo).",
            f"In its /etc/hosts replace 127.0.1.1 by the address at which the other hosts reach {facts.host}.",
        )


def are_loopback(addresses: Sequence[str]) -> bool:
    """Are all of these addresses on the loopback interface?"""
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def check_hostnames(survey: Survey) -> Iterator[Finding]:
    """Find hosts that are listed twice, and different hosts with the same hostname."""
    listed_names: dict[str, list[str]] = defaultdict(list)
    for name, facts in survey.answering.items():
        listed_names[facts.host].append(name)
    addresses = {
        name: {each.address for each in facts.machine.network.interfaces if each.between_hosts}
        for name, facts in survey.answering.items()
    }
    for name, facts in survey.answering.items():
        listed = name.rpartition("@")[2]
        alone = len(listed_names[facts.host]) == 1  # else another check has a worse finding
        if alone and listed != "localhost" and not _is_address(listed) and _short(facts.host) != _short(listed):
            yield Finding.note(
                "hostname-differs",
                f"{listed} has the hostname {facts.host}: programs that compare names (torchrun, Slurm) take them "
                "for two hosts.",
                "List it by its hostname.",
                (name,),
            )
    for hostname, names in listed_names.items():
        if len(names) < 2:
            continue
        if all(addresses[name] == addresses[names[0]] for name in names):
            yield Finding.error(
                "host-twice",
                f"{' and '.join(names)} are the same host, {hostname}.",
                "List it once, with the slots of both.",
                tuple(names),
            )
        else:
            yield Finding.error(
                "hostname-twice",
                f"{' and '.join(names)} both have the hostname {hostname}: MPI and NCCL take their ranks for those of "
                "one host, and look for shared memory that is not there.",
                "Give each host a name of its own (hostnamectl set-hostname), or each container (--hostname).",
                tuple(names),
            )


def check_lookups(survey: Survey) -> Iterator[Finding]:
    """Check the addresses to which other hosts resolve each host's name."""
    answering = survey.answering
    for target in answering:
        name = target.rpartition("@")[2]
        found = {each.source: each.addresses for each in survey.lookups if each.name == name and each.source != target}
        unknown = [source for source, addresses in found.items() if not addresses]
        if unknown:
            yield Finding.error(
                "name-unknown",
                f"The name {name} resolves to no address on {', '.join(unknown)}.",
                f"Put {name} into DNS, or the same /etc/hosts on every host.",
                tuple(unknown),
            )
        looped = [source for source, addresses in found.items() if addresses and are_loopback(addresses)]
        if looped:
            yield Finding.error(
                "name-loopback",
                f"The name {name} resolves to the loopback address {found[looped[0]][0]} on {', '.join(looped)}.",
                f"Correct {name} in /etc/hosts of {', '.join(looped)}.",
                tuple(looped),
            )
    yield from _check_master(survey)


def _check_master(survey: Survey) -> Iterator[Finding]:
    name = survey.here.environ.get("MASTER_ADDR", "")
    answering = survey.answering
    if not name or len(answering) < 2:
        return
    for each in survey.lookups:
        if each.name != name or each.source not in answering:
            continue
        if not each.addresses:
            yield Finding.error(
                "master-address",
                f"MASTER_ADDR={name} resolves to no address on {each.source}.",
                "Set it to a name of the job's first host that all hosts can resolve.",
                (each.source,),
            )
            return
        if not are_loopback(each.addresses) and not any(
            address in addresses_of(facts) for facts in answering.values() for address in each.addresses
        ):
            yield Finding.error(
                "master-address",
                f"MASTER_ADDR={name} resolves to {each.addresses[0]}, which is no host of the job; perhaps the login "
                "host (SLURM_LAUNCH_NODE_IPADDR).",
                "Set it to the name of the job's first host.",
                (each.source,),
            )
            return


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _short(name: str) -> str:
    return name.partition(".")[0].lower()


#: A network counts as slow if another is this many times faster.
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
        # If the name or the connection is wrong, another check reports it, and ssh cannot work.
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
    """Find a network that all hosts share and that is much faster than the network of their names."""
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
        yield Finding.warning(
            "slow-network",
            f"The host names resolve to a network with {slowest:.0f} Mbit/s, but {describe_subnet(survey, best)} "
            f"has {rates[best]:.0f}.",
            f"Make the names resolve to it; or for Open MPI set OMPI_MCA_btl_tcp_if_include={best}, and "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to its interfaces.",
        )


def _explain_reach(survey: Survey, target: str, address: str, problem: str, sources: list[str], own: bool) -> Finding:
    where = f"{target} ({address})"
    way = describe_common_network(survey)
    hosts = tuple(sources)
    if problem == "other" and own:
        return Finding.error(
            "name-other-host",
            f"When {', '.join(sources)} connects to {address}, an address of {target}, another machine answers.",
            f"Give {target} an address that no other machine, container or virtual machine has.{way}",
            hosts,
        )
    if not own:
        return Finding.error(
            "name-other-host",
            f"On {', '.join(sources)} the name {target} resolves to {address}, which is not an address of {target}.",
            f"Correct {target} in DNS, or in /etc/hosts of {', '.join(sources)}.{way}",
            hosts,
        )
    network = subnet_of(survey.answering[target], address)
    apart = [source for source in sources if network and network not in subnets_of(survey.answering[source])]
    if apart:
        return Finding.error(
            "wrong-subnet",
            f"{', '.join(apart)} cannot reach {where} ({problem}): this address is in the network {network}, and "
            f"{', '.join(apart)} has no address in it.",
            f"Make {target} resolve to an address in a network that all hosts share.{way}",
            hosts,
        )
    cause = {"timeout": "packets are dropped", "refused": "the connection is refused"}.get(problem, problem)
    return Finding.error(
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


#: Variables whose values are names of interfaces; NCCL's are prefixes of names.
_PREFIXES = "NCCL_SOCKET_IFNAME"
VARIABLES = (
    *(_PREFIXES, "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "HVDKIT_NETWORK_INTERFACES"),
    *("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include"),
    *("PRTE_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include"),
    *("HYDRA_IFACE", "I_MPI_HYDRA_IFACE", "FI_TCP_IFACE"),
)


def select(variable: str, value: str, interfaces: Sequence[InterfaceAddress]) -> list[InterfaceAddress]:
    """Select the interfaces that a variable's value denotes: names, NCCL's prefixes, or networks like 10.0.0.0/8."""
    words = [word.strip() for word in value.lstrip("^=").split(",") if word.strip()]
    if variable == _PREFIXES and not value.startswith("="):
        chosen = [each for each in interfaces if each.name.startswith(tuple(words))]
    else:
        chosen = [each for each in interfaces if any(_is_meant(word, each) for word in words)]
    if value.startswith("^"):
        return [each for each in interfaces if each not in chosen and not each.loopback]
    return chosen


def check_interfaces(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check each variable on this host."""
    interfaces = facts.machine.network.interfaces
    if not interfaces:
        return
    for variable in VARIABLES:
        value = facts.environ.get(variable, "")
        if not value:
            continue
        chosen = select(variable, value, interfaces)
        have = ", ".join(dict.fromkeys(f"{each.name} ({each.address})" for each in interfaces if not each.loopback))
        if not chosen:
            yield Finding.error(
                "interface-missing",
                f"{variable}={value}, but {facts.host} has no such interface; it has {have or 'only loopback'}.",
                f"Name an interface of every host, or a subnet if the variable allows it, or unset {variable}.",
            )
        elif job.hosts > 1 and all(not each.between_hosts for each in chosen):
            yield Finding.error(
                "interface-inside",
                f"{variable}={value} is {', '.join(f'{each.name} ({each.address})' for each in chosen)}, which leads "
                "to no other host.",
                f"Name the interface between the hosts, or unset {variable}.",
            )


def _is_meant(word: str, interface: InterfaceAddress) -> bool:
    if "/" in word:
        try:
            return ipaddress.ip_address(interface.address) in ipaddress.ip_network(word, strict=False)
        except ValueError:
            return False
    return word == interface.name or word == interface.address


def check_chosen_interfaces(survey: Survey) -> Iterator[Finding]:
    """Check that the interfaces which each set variable selects on the hosts reach each other."""
    hosts = survey.answering
    for variable in VARIABLES:
        values = {name: facts.environ.get(variable, "") for name, facts in hosts.items()}
        chosen = {
            name: [
                each for each in select(variable, value, hosts[name].machine.network.interfaces) if not each.loopback
            ]
            for name, value in values.items()
            if value
        }
        if len(chosen) < 2 or not all(chosen.values()):
            continue  # not set, or a finding of one host
        if any(not any(each.between_hosts for each in found) for found in chosen.values()):
            continue  # also a finding of one host
        reached = {(each.source, each.target, each.address) for each in survey.reaches if not each.problem}
        broken = [
            (source, target)
            for source in chosen
            for target in chosen
            if source != target
            and not any(
                (source, target, there.address) in reached and is_inside(here.address, there.subnet)
                for here in chosen[source]
                for there in chosen[target]
            )
        ]
        if not broken:
            continue
        source, target = broken[0]
        shown = ", ".join(f"{name} {each}" for name in chosen for each in chosen[name])
        yield Finding.error(
            "interface-apart",
            f"{variable}={values[source]} is not one network: {shown}. From {source} it does not reach {target}.",
            f"Name the interface between the hosts, or unset {variable}.{describe_common_network(survey)}",
            tuple(dict.fromkeys(name for pair in broken for name in pair)),
        )
