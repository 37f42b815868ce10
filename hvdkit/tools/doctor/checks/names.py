"""This host's own names, as it sees them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.job import Job


def check_names(facts: Facts, job: Job) -> Iterator[Finding]:
    """Judge what the host's name and localhost lead to."""
    network = facts.machine.network
    if not network.localhost or not are_loopback(network.localhost):
        seen = f"leads to {', '.join(network.localhost)}" if network.localhost else "leads to no address"
        yield Finding("error", "localhost", f"The name localhost {seen}.", "Put into /etc/hosts: 127.0.0.1 localhost")
    if any(each.loopback and not each.up for each in network.interfaces):
        yield Finding("error", "loopback-down", "The interface lo is down.", "As root: ip link set lo up")
    if job.hosts < 2:
        return
    if not network.addresses:
        yield Finding(
            "warning",
            "hostname",
            f"{facts.host}, as this host calls itself, leads to no address.",
            f"Put it into DNS, or into /etc/hosts of every host: ADDRESS {facts.host}",
        )
    elif are_loopback(network.addresses):
        yield Finding(
            "warning",
            "hostname",
            f"{facts.host} leads to {', '.join(network.addresses)} on the host itself: what it tells others as its "
            "address is theirs (MASTER_ADDR=$(hostname -i), Gloo).",
            f"In its /etc/hosts give {facts.host} the address that the other hosts know, in place of 127.0.1.1.",
        )


def are_loopback(addresses: Sequence[str]) -> bool:
    """Tell whether all of these addresses lead to the host itself."""
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
