"""Variables that name an interface: does it lead from each host to each other?"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from hvdkit.tools.doctor.checks.interfaces import VARIABLES, select
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.hosts.networks import common_networks, describe_network
from hvdkit.tools.doctor.hosts.seen import Survey


def check_chosen_interfaces(survey: Survey) -> Iterator[Finding]:
    """Judge each variable that is set, if every host has what it names."""
    hosts = dict(survey.answering)
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
        if any(all(each.bridge for each in found) for found in chosen.values()):
            continue  # the same
        reached = {(each.source, each.target, each.address) for each in survey.reaches if not each.problem}
        broken = [
            (source, target)
            for source in chosen
            for target in chosen
            if source != target
            and not any(
                (source, target, there.address) in reached and _same(here.address, there.address, there.prefix)
                for here in chosen[source]
                for there in chosen[target]
            )
        ]
        if not broken:
            continue
        source, target = broken[0]
        shown = ", ".join(
            f"{name} {each.name} {each.address}/{each.prefix}" for name in chosen for each in chosen[name]
        )
        others = common_networks(survey)
        way = f" All hosts reach one another on {describe_network(survey, others[0])}." if others else ""
        yield Finding(
            "error",
            "interface-apart",
            f"{variable}={values[source]} is not one network: {shown}. From {source} it does not lead to {target}.",
            f"Name the interface between the hosts, or unset {variable}.{way}",
            tuple(dict.fromkeys(name for pair in broken for name in pair)),
        )


def _same(a: str, b: str, prefix: int) -> bool:
    return ipaddress.ip_address(a) in ipaddress.ip_network(f"{b}/{prefix}", strict=False)
