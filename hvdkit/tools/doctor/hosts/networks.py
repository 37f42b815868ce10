"""Which networks the hosts share, and can use."""

from __future__ import annotations

import ipaddress

from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.hosts.seen import Survey

Network = ipaddress.IPv4Network


def addresses_of(facts: Facts) -> set[str]:
    """List a host's own addresses."""
    return {each.address for each in facts.machine.network.interfaces}


def network_of(facts: Facts, address: str) -> Network | None:
    """Tell the network of one of a host's addresses; None if it is not one of them."""
    for each in facts.machine.network.interfaces:
        if each.address == address:
            return Network(f"{each.address}/{each.prefix}", strict=False)
    return None


def common_networks(survey: Survey) -> list[Network]:
    """List the networks in which every host reached every other one that it tried, the fastest first."""
    hosts = dict(survey.answering)
    reached: dict[Network, set[tuple[str, str]]] = {}
    speed: dict[Network, float] = {}
    for each in survey.reaches:
        network = network_of(hosts[each.target], each.address) if each.target in hosts else None
        if network is not None and not each.problem:
            reached.setdefault(network, set()).add((each.source, each.target))
            speed[network] = max(speed.get(network, 0.0), each.mbit)
    pairs = {(each.source, each.target) for each in survey.reaches if {each.source, each.target} <= hosts.keys()}
    return sorted(
        (network for network, found in reached.items() if pairs <= found), key=lambda network: -speed[network]
    )


def describe_network(survey: Survey, network: Network) -> str:
    """Tell a network with the names of its interfaces."""
    names = dict.fromkeys(
        each.name
        for _, facts in survey.answering
        for each in facts.machine.network.interfaces
        if ipaddress.ip_address(each.address) in network
    )
    return f"{network} ({', '.join(names)})"
