"""Checks of the variables that select network interfaces."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from hvdkit.launch.plan.network import InterfaceAddress, is_inside
from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest
from hvdkit.tools.doctor.survey import Survey, describe_common_network

#: Variable -> how its value is read.
VARIABLES = {
    "NCCL_SOCKET_IFNAME": "prefixes",
    "GLOO_SOCKET_IFNAME": "names",
    "TP_SOCKET_IFNAME": "names",
    "HOROVOD_GLOO_IFACE": "names",
    "HVDKIT_NETWORK_INTERFACES": "names",
    "OMPI_MCA_btl_tcp_if_include": "names",
    "OMPI_MCA_oob_tcp_if_include": "names",
    "PRTE_MCA_oob_tcp_if_include": "names",
    "PRTE_MCA_prte_if_include": "names",
    "HYDRA_IFACE": "names",
    "I_MPI_HYDRA_IFACE": "names",
    "FI_TCP_IFACE": "names",
}


def select(variable: str, value: str, interfaces: Sequence[InterfaceAddress]) -> list[InterfaceAddress]:
    """Select the interfaces that a variable's value means: names, NCCL's prefixes, or networks like 10.0.0.0/8."""
    words = [word.strip() for word in value.lstrip("^=").split(",") if word.strip()]
    if VARIABLES.get(variable) == "prefixes" and not value.startswith("="):
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
            yield Finding(
                "error",
                "interface-missing",
                f"{variable}={value}, but {facts.host} has no such interface; it has {have or 'only loopback'}.",
                f"Name an interface of every host, or a subnet if the variable allows it, or unset {variable}.",
            )
        elif job.hosts > 1 and all(not each.between_hosts for each in chosen):
            yield Finding(
                "error",
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
    """Check each variable that is set, if every host has the interface that it names."""
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
            continue  # the same
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
        yield Finding(
            "error",
            "interface-apart",
            f"{variable}={values[source]} is not one network: {shown}. From {source} it does not reach {target}.",
            f"Name the interface between the hosts, or unset {variable}.{describe_common_network(survey)}",
            tuple(dict.fromkeys(name for pair in broken for name in pair)),
        )
