"""Checks of host names, and of what they resolve to on each host."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator, Sequence

from hvdkit.tools.doctor.facts import HostFacts
from hvdkit.tools.doctor.findings import Finding, JobRequest
from hvdkit.tools.doctor.survey import Survey, addresses_of


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
    """Are all of these addresses the loopback interface's?"""
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
        alone = len(listed_names[facts.host]) == 1  # else there is a worse finding
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
    """Check the addresses of each host's name on the other hosts."""
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
