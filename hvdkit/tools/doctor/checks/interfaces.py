"""Variables that name a network interface: is it there, and does it lead anywhere?"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.job import Job
from hvdkit.tools.doctor.machine import Interface

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


def select(variable: str, value: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Choose the interfaces that the value of a variable means: names, NCCL's prefixes, or networks like 10.0.0.0/8."""
    up = [interface for interface in interfaces if interface.up]
    words = value.lstrip("^=").split(",")
    if VARIABLES.get(variable) == "prefixes" and not value.startswith("="):
        chosen = [each for each in up if any(each.name.startswith(word.strip()) for word in words if word.strip())]
    else:
        chosen = [each for each in up if any(_is_meant(word.strip(), each) for word in words)]
    return [each for each in up if each not in chosen and not each.loopback] if value.startswith("^") else chosen


def check_interfaces(facts: Facts, job: Job) -> Iterator[Finding]:
    """Judge each variable on this host."""
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
                f"{variable}={value}, and {facts.host} has no such interface; it has {have or 'none but loopback'}.",
                f"Name one that every host has, or a network where the variable allows it, or unset {variable}.",
            )
        elif job.hosts > 1 and all(each.loopback or each.bridge for each in chosen):
            yield Finding(
                "error",
                "interface-inside",
                f"{variable}={value} is {', '.join(f'{each.name} ({each.address})' for each in chosen)}, which leads "
                "to no other host.",
                f"Name the interface between the hosts, or unset {variable}.",
            )


def _is_meant(word: str, interface: Interface) -> bool:
    if "/" in word:
        try:
            return ipaddress.ip_address(interface.address) in ipaddress.ip_network(word, strict=False)
        except ValueError:
            return False
    return word == interface.name or word == interface.address
